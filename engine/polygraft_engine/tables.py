"""What the adapters in the slots do to embed_tokens and lm_head: each for the rows of its own sequences only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from polygraft_kernels.api import Affine, Backend, LoraGroups, LoraPair, PackedLinear, PackedLora


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of a table that an adapter retrained: ids int64 [n], ascending, and their rows [n, K]."""

    ids: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class EmbeddingLora:
    """x += scale * B a[token], with a [V, r], one row a token, and B [K, r]."""

    a: Tensor
    b: PackedLinear
    scale: float


@dataclass(frozen=True, slots=True)
class EmbeddingPatch:
    """One adapter's embed_tokens: gain * (row + LoRA), of another table or of retrained rows where there are such."""

    table: Tensor | None
    """[V, K]"""
    tokens: TableRows | None
    lora: EmbeddingLora | None
    gain: Tensor | None
    """float32 [K]"""
    nbytes: int

    def rows(self, x: Tensor, token_ids: Tensor, backend: Backend) -> Tensor:
        """The rows [T, K] of token_ids int64 [T], of which x [T, K] are the base's. No device sync."""
        if self.table is not None:
            x = torch.embedding(self.table, token_ids)
        if self.tokens is not None:
            found = torch.searchsorted(self.tokens.ids, token_ids).clamp_(max=len(self.tokens.ids) - 1)
            retrained = self.tokens.ids[found] == token_ids
            x = torch.where(retrained[:, None], self.tokens.rows[found], x)
        if self.lora is None:
            return x
        y = x.float() + self.lora.scale * backend.logits(torch.embedding(self.lora.a, token_ids), self.lora.b)
        return (y if self.gain is None else self.gain * y).to(x.dtype)


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows of the head that an adapter retrained: ids int64 [n] and the rows [n, K], packed."""

    ids: Tensor
    rows: PackedLinear


@dataclass(frozen=True, slots=True)
class HeadPatch:
    """One adapter's lm_head: another weight, retrained rows of it, and LoRA."""

    weight: PackedLinear | None
    tokens: HeadRows | None
    lora: PackedLora | None
    nbytes: int


class TableSlots:
    """The patches of the adapters in the slots, and the two operations that heed them. Rows without any are the base's
    own, computed together.
    """

    def __init__(self, backend: Backend, hidden: int, vocabulary: int, num_slots: int) -> None:
        self._backend = backend
        # in float32, as logits are: rounding them to half precision would make ties of near ties
        self._bank = backend.lora_bank(hidden, [vocabulary], num_slots, torch.float32)
        self._embeddings: list[EmbeddingPatch | None] = [None] * num_slots
        self._heads: list[HeadPatch | None] = [None] * num_slots

    def load(self, slot: int, embedding: EmbeddingPatch | None, head: HeadPatch | None) -> None:
        """Make `slot` hold exactly these."""
        self._embeddings[slot] = embedding
        self._heads[slot] = head
        if head is None or head.lora is None:
            self._bank.clear(slot)
        else:
            self._bank.place(slot, head.lora)

    def pack_head(self, pair: LoraPair, affine: Affine | None) -> PackedLora:
        """LoRA on the head, as a HeadPatch holds it. On any thread."""
        return self._bank.pack([pair], [affine])

    def clear(self, slot: int) -> None:
        """Empty `slot`."""
        self.load(slot, None, None)

    def check(self) -> None:
        """Assert the invariants."""
        self._bank.check()

    def patches_embeddings(self, groups: LoraGroups) -> bool:
        """Whether any row of a step embeds its token otherwise than the base."""
        return any(self._embeddings[slot] is not None for slot in groups.slots)

    def embed(self, x: Tensor, token_ids: Tensor, groups: LoraGroups) -> None:
        """In place: the base's rows x [T, K] of token_ids int64 [T] become those of each row's adapter."""
        for slot, rows in _spans(groups):
            patch = self._embeddings[slot]
            if patch is not None:
                x[rows] = patch.rows(x[rows], token_ids[rows], self._backend)

    def logits(self, normed: Tensor, head: PackedLinear, groups: LoraGroups) -> Tensor:
        """float32 [R, V] of rows [R, K] behind the final norm; `groups` are of these rows."""
        heads = [(rows, patch) for slot, rows in _spans(groups) if (patch := self._heads[slot]) is not None]
        y = self._whole_heads(normed, head, heads)
        for rows, patch in heads:
            if patch.tokens is not None:
                y[rows].index_copy_(1, patch.tokens.ids, self._backend.logits(normed[rows], patch.tokens.rows))
        if any(patch.lora is not None for _, patch in heads):
            self._backend.lora(y, normed.float(), self._bank, groups)
        return y

    def _whole_heads(self, normed: Tensor, head: PackedLinear, heads: list[tuple[slice, HeadPatch]]) -> Tensor:
        replaced = [(rows, patch.weight) for rows, patch in heads if patch.weight is not None]
        if not replaced:
            return self._backend.logits(normed, head)
        y = torch.empty((normed.shape[0], head.out_features), dtype=torch.float32, device=normed.device)
        kept = torch.ones(normed.shape[0], dtype=torch.bool, device="cpu")
        for rows, weight in replaced:
            y[rows] = self._backend.logits(normed[rows], weight)
            kept[rows] = False
        if bool(kept.any()):
            base = kept.nonzero()[:, 0].to(normed.device)
            y[base] = self._backend.logits(normed[base], head)
        return y


def _spans(groups: LoraGroups) -> Iterator[tuple[int, slice]]:
    """Each group's slot and rows."""
    for slot, start, end in zip(groups.slots, groups.starts, groups.starts[1:], strict=False):
        yield slot, slice(start, end)
