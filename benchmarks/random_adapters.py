"""Random adapters for load tests: `python benchmarks/random_adapters.py MODEL OUT [--ranks 8,12,16,24,32]`.

Writes OUT/r8-0, OUT/r12-1, ...: PEFT folders over all seven modules of every layer, the ranks in turn. Prints
the options with which `polygraft serve` takes them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from itertools import cycle, islice
from pathlib import Path

import torch
from safetensors.torch import save_file

from polygraft_adapters import ModuleKey
from polygraft_engine.models.architecture import read_spec


def write(folder: Path, model: Path, rank: int, seed: int, targets: Collection[str] | None = None) -> None:
    """One PEFT folder with small random weights in bfloat16, on all modules or on `targets`."""
    generator = torch.Generator().manual_seed(seed)
    modules = read_spec(model).module_shapes(model.name)
    shapes = {target: shape for target, shape in modules.shapes.items() if targets is None or target in targets}
    tensors = {}
    for layer in range(modules.layers):
        for target, (outputs, inputs) in shapes.items():
            path = f"base_model.model.{ModuleKey(layer, target).path}"
            for name, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                values = torch.randn(shape, generator=generator) * 0.01
                tensors[f"{path}.{name}.weight"] = values.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(shapes)}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": model.name}))


def main() -> None:
    """Write the adapters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", default="8,12,16,24,32")
    parser.add_argument("--count", type=int, default=8)
    arguments = parser.parse_args()
    ranks = [int(rank) for rank in arguments.ranks.split(",")]
    for seed, rank in enumerate(islice(cycle(ranks), arguments.count)):
        name = f"r{rank}-{seed}"
        write(arguments.out / name, arguments.model, rank, seed)
        print(f"--adapter {name}={arguments.out / name}")


if __name__ == "__main__":
    main()
