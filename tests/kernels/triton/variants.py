"""The kernels as a GPU would meet them: signatures and constants at shapes of real models, for a compiler alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from triton import JITFunction

from polygraft_kernels.triton import attention, attention_kernels, kv, linear, lora, place, pointwise
from polygraft_kernels.triton.tiles import ROWS

ITEMSIZE = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation: `types` of the arguments by name, what is not named is a constant."""

    name: str
    kernel: JITFunction
    types: dict[str, str]
    constants: dict[str, int | bool]
    options: dict[str, int | bool] = field(default_factory=dict)


def variants() -> Iterator[Variant]:
    """Every kernel, in both dtypes or more, at the shapes of small and large models."""
    for element in ITEMSIZE:
        yield from _pointwise(element)
        yield from _lora(element)
        yield from _attention(element)
        yield from _linear(element)


def _pointers(element: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{element}")


def _ints(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


def _linear(element: str) -> Iterator[Variant]:
    for weight in (element, "i8") if element == "bf16" else (element,):
        for rows in (linear.LEAST_ROWS, linear.MANY_ROWS):
            for result in sorted({element, "fp32"}):
                yield Variant(
                    f"linear {element} weight={weight} result={result} rows={rows}",
                    linear.linear_kernel,
                    {
                        "y": f"*{result}",
                        "x": f"*{element}",
                        "weight": f"*{weight}",
                        **_pointers(element, "bias"),
                        "scale": "*fp32",
                        **_ints("rows", "outputs", "inputs", "x_stride"),
                    },
                    {"SCALED": weight == "i8", "BIASED": True, "BLOCK_T": rows}
                    | {"BLOCK_N": linear.BLOCK_N, "BLOCK_K": linear.BLOCK_K},
                    linear.launch_options(ITEMSIZE[element]),
                )


def _pointwise(element: str) -> Iterator[Variant]:
    for width in (4096, 16384):
        warps = {"num_warps": pointwise.warps_for(width)}
        yield Variant(
            f"rms_norm {element} {width}",
            pointwise.rms_norm_kernel,
            {
                **_pointers(element, "out", "x", "weight"),
                "eps": "fp32",
                **_ints("inner", "width", "outer_stride", "inner_stride"),
            },
            {"BLOCK": width},
            warps,
        )
        yield Variant(
            f"add_rms_norm {element} {width}",
            pointwise.add_rms_norm_kernel,
            {**_pointers(element, "total", "normed", "x", "y", "weight"), "eps": "fp32", **_ints("width")},
            {"BLOCK": width},
            warps,
        )
    strides = _ints("q_row_stride", "q_head_stride", "k_row_stride", "k_head_stride")
    yield Variant(
        f"rope {element}",
        pointwise.rope_kernel,
        {
            **_pointers(element, "q", "k"),
            "positions": "*i64",
            "table": "*fp32",
            **_ints("heads", "kv_heads"),
            **strides,
        },
        {"HALF": 64, "BLOCK": 64, "BLOCK_H": pointwise.HEADS},
        {"num_warps": 4},
    )
    yield Variant(
        f"place {element}",
        place.place_kernel,
        {
            **_pointers(element, "qkv", "keys", "values"),
            "positions": "*i64",
            "slot_mapping": "*i64",
            "table": "*fp32",
            **_pointers(element, "q_norm", "k_norm"),
            "eps": "fp32",
            **_ints("heads", "row_stride"),
        },
        {"KV_HEADS": 8, "HALF": 64, "BLOCK": 64, "BLOCK_H": pointwise.HEADS, "BLOCK_SIZE": 16, "NORMED": True},
        {"num_warps": 4},
    )
    yield Variant(
        f"silu_mul {element}",
        pointwise.silu_mul_kernel,
        {**_pointers(element, "out", "gate_up"), **_ints("width", "row_stride")},
        {"BLOCK": pointwise.ELEMENTS},
        {"num_warps": 4},
    )
    yield Variant(
        f"store_kv {element}",
        kv.store_kv_kernel,
        {
            **_pointers(element, "keys", "values", "k", "v"),
            "slot_mapping": "*i64",
            **_ints("k_row_stride", "k_head_stride", "v_row_stride", "v_head_stride"),
        },
        {"KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "BLOCK_H": 8, "BLOCK_D": 128},
        {"num_warps": 4},
    )


def _lora(element: str) -> Iterator[Variant]:
    tables = {"tiles": "*i32", "pointers": "*i64", "ranks": "*i32"}
    blocks = {"BLOCK_R": lora.BLOCK_R, "TILE": ROWS}
    for few in (0, lora.GEMV_ROWS) if element == "bf16" else (lora.GEMV_ROWS,):
        yield Variant(
            f"shrink {element} few={few}",
            lora.shrink_kernel,
            {"v": "*fp32", **_pointers(element, "x"), **tables, **_ints("rows", "width", "x_stride", "bound")},
            {"SEGMENTS": 3, "SPLIT": lora.SPLIT_K, "BLOCK_K": lora.BLOCK_K, **blocks, "FEW": few},
            {"num_warps": lora.SHRINK_WARPS},
        )
        yield Variant(
            f"expand {element} few={few}",
            lora.expand_kernel,
            {
                **_pointers(element, "y"),
                "v": "*fp32",
                **tables,
                "scales": "*fp32",
                "blocks": "*i32",
                **_ints("rows", "y_stride", "bound"),
            },
            {"SEGMENTS": 3, "SPLITS": 4, "BLOCK_N": lora.BLOCK_N, **blocks, "FEW": few, "ALIGNED": True},
            {"num_warps": lora.EXPAND_WARPS},
        )


def _attention(element: str) -> Iterator[Variant]:
    indices = {"query_starts": "*i32", "context_lens": "*i32"}
    partial = {"peaks": "*fp32", "masses": "*fp32", "sums": "*fp32"}
    shapes = [(128, False, False), (256, False, False)]
    if element == "bf16":  # float32 has no wide tiles
        shapes += [(64, False, False), (128, False, True), (64, True, False), (128, True, True), (256, True, False)]
    for head_dim, wide, windowed in shapes:
        tiles = attention.tiling(wide, 4, head_dim, ITEMSIZE[element])
        shape = {"KV_HEADS": 8, "SHARE": 4, "HEAD_DIM": head_dim, "BLOCK_M": tiles.block_m, "BLOCK_D": tiles.block_d}
        shape |= {"SPAN": attention.SPAN, "WINDOWED": windowed}
        name = f"{element} head_dim={head_dim}{' wide' if wide else ''}{' window' if windowed else ''}"
        yield Variant(
            f"attend {name}",
            attention_kernels.attend_kernel,
            {
                **_pointers(element, "out"),
                **partial,
                **_pointers(element, "q", "keys", "values"),
                **indices,
                "block_tables": "*i32",
                **_ints("sequences", "q_row_stride", "q_head_stride", "table_stride", "pairs", "window"),
                "scale": "fp32",
            },
            {**shape, "BLOCK_SIZE": 16, "BLOCK_N": tiles.block_n, "BLOCK_S": 64},
            tiles.options,
        )
        yield Variant(
            f"merge {name}",
            attention_kernels.merge_kernel,
            {**_pointers(element, "out"), **partial, **indices, **_ints("parts", "pairs", "window")},
            shape,
            tiles.options,
        )
