"""Synthetic English prompts, all different from the first words on, so that no prefix cache can help."""

from __future__ import annotations

import random
from dataclasses import dataclass

_WHO = (
    "the baker", "a young engineer", "my neighbour", "the old sailor", "our teacher", "a patient gardener", "the mayor",
    "a travelling musician", "the librarian", "one of the twins", "the night watchman", "a curious child", "the doctor",
    "their grandmother", "a tired courier", "the painter", "an honest merchant", "the astronomer", "a stranger",
)  # fmt: skip
_DID = (
    "carried", "described", "repaired", "painted", "forgot", "discovered", "borrowed", "measured", "sold", "imagined",
    "hid", "collected", "examined", "praised", "rebuilt", "followed", "drew", "questioned", "polished", "returned",
)  # fmt: skip
_WHAT = (
    "a wooden boat", "the broken clock", "seven letters", "the map of the coast", "a basket of apples", "the iron gate",
    "an unfinished novel", "the bridge over the river", "a silver coin", "the garden wall", "three old photographs",
    "the recipe for bread", "a pair of gloves", "the telescope", "a jar of honey", "the winter coats", "a small radio",
)  # fmt: skip
_WHEN = (
    "before sunrise", "during the long winter", "without telling anybody", "for the second time", "near the harbour",
    "while it was raining", "on the last day of March", "behind the station", "as quickly as possible", "in silence",
    "with great care", "after the concert", "for no clear reason", "under the oak tree", "between two meetings",
)  # fmt: skip
_SYLLABLES = ("ba", "do", "fi", "ga", "ke", "lo", "mu", "na", "pe", "qui", "ra", "so", "ti", "vu", "wen", "zo")


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Makes the prompt of each request from a seed: the same seed, the same prompts."""

    seed: int
    words: int
    """Length of a prompt."""

    def prompt(self, number: int) -> str:
        """The prompt of request `number`."""
        rng = random.Random(f"{self.seed}/{number}")
        name = "".join(rng.choice(_SYLLABLES) for _ in range(4)).capitalize()
        words = [name, str(rng.randrange(1000)), "wrote:"]
        while len(words) < self.words:
            sentence = f"{rng.choice(_WHO)} {rng.choice(_DID)} {rng.choice(_WHAT)} {rng.choice(_WHEN)}."
            words += (sentence[0].upper() + sentence[1:]).split()
        return " ".join(words[: self.words])
