"""Every kernel compiles for the GPUs it is meant for, without one, within bounds on spills and shared memory.

NVIDIA: the stack that cuobjdump finds in the binary, which is where spilled registers go. AMD: the spilled vector
registers and scratch memory that the assembly declares. Whether a kernel is right or fast there, no compiler says.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import triton
from tests.kernels.triton.variants import Variant, variants
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from polygraft_kernels.triton import attention_kernels, kv, linear, lora, place, pointwise

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""What one block may take."""
SPILLED_BYTES = 64
"""Of a thread's stack."""


def compiled(variant: Variant, target: GPUTarget) -> CompiledKernel:
    """The kernel's code for `target`, specialised as Triton does for aligned tensors and sizes."""
    names = variant.kernel.arg_names
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    assert set(signature) - set(variant.types) == set(variant.constants), "a name is missing or unknown"
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*")
        or (signature[name] == "i32" and not variant.kernel.params[index].do_not_specialize)
    }
    source = ASTSource(variant.kernel, signature, variant.constants, aligned)
    return triton.compile(source, target=target, options=variant.options)


def spilled(kernel: CompiledKernel, target: GPUTarget, folder: Path) -> int:
    """Bytes of stack a thread needs: a kernel without spills needs none, or few."""
    if target.backend == "hip":
        registers = re.findall(r"\.vgpr_spill_count:\s*(\d+)", kernel.asm["amdgcn"])
        scratch = re.findall(r"\.private_segment_fixed_size:\s*(\d+)", kernel.asm["amdgcn"])
        assert registers
        assert scratch
        return max(4 * int(registers[0]), int(scratch[0]))
    code = folder / "kernel.cubin"
    code.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", code], capture_output=True, text=True, check=True).stdout
    stack, local = re.search(r"STACK:(\d+)", usage), re.search(r"LOCAL:(\d+)", usage)
    assert stack is not None, usage
    assert local is not None, usage
    return int(stack[1]) + int(local[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_every_kernel_compiles_without_spills(name: str, tmp_path: Path) -> None:
    target, wrong = TARGETS[name], []
    for variant in variants():
        kernel = compiled(variant, target)
        assert kernel.metadata.shared <= SHARED_BYTES[name], f"{variant.name} takes {kernel.metadata.shared} bytes"
        if (size := spilled(kernel, target, tmp_path)) > SPILLED_BYTES:
            wrong.append(f"{variant.name}: {size}")
    assert not wrong, f"spills on {name}: {wrong}"


def test_no_kernel_is_forgotten() -> None:
    rooms = (attention_kernels, kv, linear, lora, place, pointwise)
    kernels = {name for room in rooms for name in vars(room) if name.endswith("_kernel")}
    assert {variant.kernel.__name__ for variant in variants()} == kernels
