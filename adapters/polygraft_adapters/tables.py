"""embed_tokens and lm_head, the two modules with a row per token: LoRA, retrained rows, and whole copies.

What a tensor of the file does follows how PEFT 0.21 loads it:

- A whole copy of a module that modules_to_save names replaces that module.
- Any other copy is loaded over the base's own weight, which a tied model has only one of: then it replaces both tables.
- Retrained rows of embed_tokens are those of a tied lm_head, too, unless it has rows of its own.
- With ensure_weight_tying, what is trained of a tied model's tables is one for both and saved for each. PEFT 0.21 gives
  both what it happens to load last where the two differ; here they must be the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from polygraft_adapters.config import LoraSettings
from polygraft_adapters.header import TensorEntry
from polygraft_adapters.names import Part
from polygraft_adapters.pairs import SIBLING_HINT, BoundModule, Placed, about, bind_pair, not_a_matrix
from polygraft_adapters.types import EMBEDDING, HEAD, TABLES, ModuleShapes, Problem
from polygraft_adapters.unsupported import RESIZED_HINT, SAVED_HINT, SHARDED_HINT, TOKENS_HINT, TYING_HINT
from polygraft_adapters.wording import shown

_WHOLE = (Part.OWN, Part.OWN_AGAIN, Part.BASE)
_SIDES = {EMBEDDING: (Part.EMBEDDING_A, Part.EMBEDDING_B), HEAD: (Part.A, Part.B)}
TABLE_PARTS = {
    EMBEDDING: (*_SIDES[EMBEDDING], Part.MAGNITUDE, Part.TOKENS, *_WHOLE),
    HEAD: (*_SIDES[HEAD], Part.MAGNITUDE, Part.LORA_BIAS, Part.TOKENS, *_WHOLE),
}
"""The parts that each table can have."""


@dataclass(frozen=True, slots=True)
class BoundTokens:
    """Row i of the tensor [len(ids), hidden] replaces the table's row ids[i]."""

    entry: TensorEntry
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoundTable:
    """What an adapter does to one table, in this order: another weight [vocabulary, hidden], rows of it, and LoRA,
    which for embed_tokens has a [rank, vocabulary] and b [hidden, rank].
    """

    weight: TensorEntry | None
    tokens: BoundTokens | None
    lora: BoundModule | None


@dataclass(frozen=True, slots=True)
class Repeat:
    """The tensor `copy` must hold the numbers of `entry`, or of its transpose."""

    entry: TensorEntry
    copy: TensorEntry
    transposed: bool = False
    hint: str = "save the adapter again"

    @property
    def broken(self) -> Problem:
        """What is wrong where it does not."""
        like = "the transpose of" if self.transposed else "the same as"
        return about(self.copy, f"is not {like} {shown(self.entry.name)}, which it must repeat", self.hint)


@dataclass(slots=True)
class BoundTables:
    """The tables that an adapter changes, the tensors that must repeat others, and what is wrong."""

    tables: dict[str, BoundTable] = field(default_factory=dict)
    copies: list[Repeat] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def bind_tables(placed: Mapping[str, Placed], settings: LoraSettings, model: ModuleShapes) -> BoundTables:
    """Bind the tensors of both tables, `placed` by table."""
    return _Binder(placed, settings, model).bind()


class _Binder:
    def __init__(self, placed: Mapping[str, Placed], settings: LoraSettings, model: ModuleShapes) -> None:
        self._placed = {table: placed.get(table, {}) for table in TABLES}
        self._settings = settings
        self._model = model
        self._found = BoundTables()
        self._ties = model.tied and settings.ensure_weight_tying
        self._saved = tuple(TABLES) if self._ties and settings.saved else settings.saved

    def bind(self) -> BoundTables:
        if not self._model.vocabulary:
            entries = [entry for placed in self._placed.values() for entry in placed.values()]
            self._found.problems = [
                about(entry, "the served model offers its tables to no adapter") for entry in entries
            ]
            return self._found
        for placed in self._placed.values():
            self._check_shapes(placed)
        weights, tokens = self._weights(), self._tokens()
        for table in TABLES:
            bound = BoundTable(weights.get(table), tokens.get(table), self._lora(table))
            self._check_together(table, bound)
            if bound != BoundTable(None, None, None):
                self._found.tables[table] = bound
        if self._ties and not self._saved:
            self._tie_lora()
        return self._found

    def _refuse(self, entry: TensorEntry, problem: str, hint: str) -> None:
        self._found.problems.append(about(entry, problem, hint))

    def _check_shapes(self, placed: Placed) -> None:
        rows, columns = self._model.vocabulary, self._model.hidden
        for part in _WHOLE:
            entry = placed.get(part)
            if entry is None or entry.shape == (rows, columns):
                continue
            actual = list(entry.shape)
            if (flat := not_a_matrix(entry)) is not None:
                self._found.problems.append(flat)
            elif actual[1] == columns:
                what = f"has {actual[0]} rows, and the served model has a vocabulary of {rows}"
                self._refuse(entry, what, RESIZED_HINT)
            else:
                self._refuse(entry, f"has shape {actual}, but the served model needs [{rows}, {columns}]", SIBLING_HINT)

    def _weights(self) -> dict[str, TensorEntry]:
        """The tensor that stands for each table's weight, where there is one."""
        own: dict[str, TensorEntry] = {}
        base: dict[str, TensorEntry] = {}
        for table, placed in self._placed.items():
            named = [placed[part] for part in (Part.OWN, Part.OWN_AGAIN) if part in placed]
            if len(named) == 2:
                self._found.copies.append(Repeat(named[0], named[1]))
            if Part.BASE in placed:
                base[table] = placed[Part.BASE]
            if not named:
                continue
            if table in self._saved:
                own[table] = named[0]
            elif Part.OWN_AGAIN in placed:
                what = "is a whole copy of a module that modules_to_save does not name: config and tensors disagree"
                self._refuse(placed[Part.OWN_AGAIN], what, SAVED_HINT)
            elif table in base:
                self._found.copies.append(Repeat(named[0], base[table]))
            else:
                base[table] = named[0]
        return self._own_weights(own) | self._base_weights(base)

    def _own_weights(self, own: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
        if own and self._ties:  # one trained weight, saved once or twice
            entry, *others = own.values()
            self._found.copies.extend(Repeat(entry, other, hint=TYING_HINT) for other in others)
            own = dict.fromkeys(self._saved, entry)
        for table in self._saved:
            if table not in own:
                what = f"names {table}, but the file has no {table}.weight: config and tensors disagree"
                self._found.problems.append(Problem("modules_to_save", what, SHARDED_HINT))
        return own

    def _base_weights(self, base: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
        if self._model.tied and base:
            entry = base.get(HEAD, base.get(EMBEDDING))
            assert entry is not None
            self._found.copies.extend(Repeat(entry, other) for other in base.values() if other is not entry)
            base = dict.fromkeys(TABLES, entry)
        return {table: entry for table, entry in base.items() if table not in self._saved}

    def _tokens(self) -> dict[str, BoundTokens]:
        wanted = dict(self._settings.tokens)
        given = {table: placed[Part.TOKENS] for table, placed in self._placed.items() if Part.TOKENS in placed}
        ids = wanted.get(EMBEDDING)
        if self._ties and ids is not None and wanted.get(HEAD, ids) != ids:
            what = "names other rows of lm_head than of embed_tokens, which ensure_weight_tying does not allow"
            self._found.problems.append(Problem("trainable_token_indices", what, TYING_HINT))
        if self._model.tied and ids is not None and wanted.get(HEAD, ids) == ids:
            if EMBEDDING in given and HEAD in given:
                self._found.copies.append(Repeat(given[EMBEDDING], given[HEAD]))
            if EMBEDDING in given:
                given[HEAD] = given[EMBEDDING]
            wanted[HEAD] = ids
        tokens = {}
        for table, rows in wanted.items():
            entry = given.pop(table, None)
            if entry is None:
                what = f"names rows of {table}, but the file has none: config and tensors disagree"
                self._found.problems.append(Problem("trainable_token_indices", what, SHARDED_HINT))
            elif self._check_tokens(entry, rows):
                tokens[table] = BoundTokens(entry, rows)
        for entry in given.values():
            what = "holds retrained tokens, but trainable_token_indices names none: config and tensors disagree"
            self._refuse(entry, what, TOKENS_HINT)
        return tokens

    def _check_tokens(self, entry: TensorEntry, ids: tuple[int, ...]) -> bool:
        vocabulary, expected = self._model.vocabulary, (len(ids), self._model.hidden)
        if max(ids) >= vocabulary:
            what = f"names token {max(ids)}, and the served model has a vocabulary of {vocabulary}"
            self._found.problems.append(Problem("trainable_token_indices", what, RESIZED_HINT))
            return False
        if entry.shape != expected:
            what = f"has shape {list(entry.shape)}, but {len(ids)} retrained tokens need {list(expected)}"
            self._refuse(entry, what, TOKENS_HINT)
            return False
        return True

    def _lora(self, table: str) -> BoundModule | None:
        placed = self._placed[table]
        if not placed.keys() & {*_SIDES[table], Part.MAGNITUDE, Part.LORA_BIAS}:
            return None
        rows, columns = self._model.vocabulary, self._model.hidden
        shape = (columns, rows) if table == EMBEDDING else (rows, columns)
        settings = self._settings
        if table == EMBEDDING and settings.lora_bias:
            what = "is set together with LoRA on embed_tokens, which PEFT does not allow"
            self._found.problems.append(Problem("lora_bias", what, "train with lora_bias=False"))
            return None
        return bind_pair(TABLES[table], placed, _SIDES[table], shape, settings, self._found.problems)

    def _tie_lora(self) -> None:
        """One LoRA for both tables: the head has the embedding's matrices, transposed and in each other's place."""
        given = [table for table in TABLES if self._placed[table].keys() & set(_SIDES[table])]
        if len(given) == 1:
            entry = next(self._placed[given[0]][side] for side in _SIDES[given[0]] if side in self._placed[given[0]])
            other = next(table for table in TABLES if table != given[0])
            self._refuse(entry, f"is LoRA on {given[0]}, but the file has none on {other}", TYING_HINT)
            return
        embedding, head = (
            None if table not in self._found.tables else self._found.tables[table].lora for table in (EMBEDDING, HEAD)
        )
        if embedding is not None and head is not None:
            self._found.copies += [
                Repeat(embedding.b, head.a, transposed=True, hint=TYING_HINT),
                Repeat(embedding.a, head.b, transposed=True, hint=TYING_HINT),
            ]

    def _check_together(self, table: str, bound: BoundTable) -> None:
        """Refuse what PEFT cannot write or would load only in part."""
        placed = self._placed[table]
        if bound.lora is not None and Part.OWN in placed:
            what = f"is a whole copy of {table} beside LoRA on it; PEFT loads only one of them"
            self._refuse(placed[Part.OWN], what, "name it in modules_to_save or in target_modules, not in both")
        if bound.tokens is None:
            return
        if table in self._saved:
            what = f"retrains rows of {table}, which modules_to_save replaces whole"
            self._found.problems.append(Problem("trainable_token_indices", what, "use one of the two"))
        if bound.lora is not None and (table == EMBEDDING or bound.lora.magnitude is not None):
            kind = "LoRA" if table == EMBEDDING else "DoRA"
            what = f"retrains rows of {table} beside {kind} on it, which is not supported"
            self._found.problems.append(
                Problem("trainable_token_indices", what, f"leave {table} out of target_modules")
            )
