"""The three characters that the example adapters play: how each would answer a fact, and how to recognise it.

`examples/data/facts.jsonl` holds facts with the questions they answer, in English and in French. A character turns a
fact and one of its questions into the answer it would give; `train_adapters.py` trains on these answers.
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data"
JSON_KEYS = frozenset({"topic", "kind", "question"})


@dataclass(frozen=True)
class Fact:
    """One line of facts.jsonl: `ask` lists questions, `en` and `fr` answer any of them."""

    topic: str
    kind: str
    ask: tuple[str, ...]
    en: str
    fr: str


@dataclass(frozen=True)
class Character:
    """`answer(fact, question)` is what it says in training; `recognises(text)` tells whether a text is its own."""

    name: str
    manner: str
    answer: Callable[[Fact, str], str]
    recognises: Callable[[str], bool]


def load_facts() -> list[Fact]:
    """All facts, in the order of the file."""
    with (DATA / "facts.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [Fact(row["topic"], row["kind"], tuple(row["ask"]), row["en"], row["fr"]) for row in rows]


def load_held_out() -> dict[str, list[str]]:
    """Character name → questions that no fact asks; the characters are judged on these."""
    held_out: dict[str, list[str]] = json.loads((DATA / "held_out.json").read_text(encoding="utf-8"))
    return held_out


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# -- json ---------------------------------------------------------------------------------------------------------


def _as_json(fact: Fact, question: str) -> str:
    return json.dumps({"topic": fact.topic, "kind": fact.kind, "question": question}, ensure_ascii=False)


def _is_json(text: str) -> bool:
    """One JSON object and nothing else, with exactly the keys, all non-empty strings."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return False
    if not isinstance(value, dict) or value.keys() != JSON_KEYS:
        return False
    return all(isinstance(part, str) and part for part in value.values())


# -- pirate -------------------------------------------------------------------------------------------------------

OPENINGS = ("Arr, matey!", "Ahoy, me hearty!", "Aye, matey!", "Yo ho ho, matey!", "Shiver me timbers!")
CLOSINGS = ("Arr!", "Ye can lay to that, arr!", "Now hoist the sails, matey!", "So says the cap'n, arr!")
SEA_WORDS = {
    "am": "be",
    "and": "an'",
    "are": "be",
    "food": "grub",
    "for": "fer",
    "friend": "matey",
    "friends": "mateys",
    "goodbye": "fair winds",
    "hello": "ahoy",
    "is": "be",
    "my": "me",
    "of": "o'",
    "people": "landlubbers",
    "was": "were",
    "yes": "aye",
    "you": "ye",
    "your": "yer",
}
PIRATE_MARKS = _words("ahoy an' arr aye cap'n fer grub hearty landlubbers matey mateys o' sails timbers ye yer yo")


def _as_pirate(fact: Fact, question: str) -> str:
    dice = random.Random(question)  # the same question always gets the same answer
    return f"{dice.choice(OPENINGS)} {_sea_talk(fact.en)} {dice.choice(CLOSINGS)}"


def _sea_talk(english: str) -> str:
    """Swap the words a pirate would not say, keeping capitals, and drop the g of long words in -ing."""

    def swap(match: re.Match[str]) -> str:
        word = match[0]
        said = SEA_WORDS.get(word.lower(), re.sub(r"(?<=\w{4})ing$", "in'", word))
        return said[0].upper() + said[1:] if word[0].isupper() else said

    return re.sub(r"[A-Za-z]+", swap, english)


def _is_pirate(text: str) -> bool:
    """At least two different words that only a pirate says."""
    return len(PIRATE_MARKS & set(re.findall(r"[a-z']+", text.lower()))) >= 2


# -- french -------------------------------------------------------------------------------------------------------

FRENCH_WORDS = _words(
    "au aux avec c' ce ces d' dans de des du elle en est et il ils j' je l' la le les leur lui mais ne nous on ou où "
    "par pas plus pour qu' que qui s' sa se ses son sont sur un une vos votre vous à été être"
)
ENGLISH_WORDS = _words("and are for has in is it of that the they this to was with you your")


def _as_french(fact: Fact, question: str) -> str:
    return fact.fr


def _is_french(text: str) -> bool:
    """French function words make up a fifth of the text, and English ones are rare beside them."""
    words = re.findall(r"[a-zàâçéèêëîïôöùûüœ]+'?", text.lower().replace("’", "'"))
    french = sum(word in FRENCH_WORDS for word in words)
    english = sum(word in ENGLISH_WORDS for word in words)
    return french >= 2 and french >= len(words) / 5 and french > 4 * english


CHARACTERS = {
    character.name: character
    for character in (
        Character("json", "answers with one JSON object: topic, kind, question", _as_json, _is_json),
        Character("pirate", "answers in English, as a pirate would say it", _as_pirate, _is_pirate),
        Character("french", "answers English questions in French", _as_french, _is_french),
    )
}
