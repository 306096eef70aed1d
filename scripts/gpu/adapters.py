"""What adapters cost beside their base, by batch, popularity and rank."""

from __future__ import annotations

from collections.abc import Iterator

from gpu.bench import Bench, Figure
from polygraft_kernels.api import LoraBank, LoraGroups

POPULARITY = ("identical", "uniform", "zipf", "distinct")


def groups_of(popularity: str, batch: int) -> LoraGroups:
    """`batch` rows by slot."""
    if popularity == "zipf":
        total = sum(1 / k for k in range(1, batch + 1))
        counts = [round(batch / k / total) for k in range(1, batch + 1)]
        counts[0] += batch - sum(counts)
    else:
        slots = {"identical": 1, "uniform": min(batch, 8), "distinct": batch}[popularity]
        counts = [batch // slots + (slot < batch % slots) for slot in range(slots)]
    held = [count for count in counts if count > 0]
    starts = [0]
    for count in held:
        starts.append(starts[-1] + count)
    return LoraGroups(tuple(range(len(held))), tuple(starts))


def adapter_cost(bench: Bench) -> Iterator[Figure]:
    """The layer's four projections with adapters, against the same without."""
    backend, sizes, weights = bench.backend, bench.sizes, bench.linears()
    inputs = {n: bench.random(max(sizes.batches), k) for n, (k, _) in sizes.projections.items()}
    plain = {}
    for batch in sizes.batches:
        plain[batch] = bench.clock(lambda b=batch: [backend.linear(inputs[n][:b], weights[n]) for n in weights])
    for rank in sizes.ranks:
        banks = bench.banks(max(sizes.batches), rank)
        for popularity in POPULARITY:
            for batch in sizes.batches:
                groups = groups_of(popularity, batch)

                def grafted(
                    batch: int = batch, groups: LoraGroups = groups, banks: dict[str, LoraBank] = banks
                ) -> None:
                    for name, weight in weights.items():
                        x = inputs[name][:batch]
                        backend.lora(backend.linear(x, weight), x, banks[name], groups)

                spent = bench.clock(grafted)
                base = plain[batch] * 1e6
                yield Figure("adapters", popularity, batch, f"rank {rank}", spent * 1e6, "us", against=base)
