"""How each kernel is compiled where there is no GPU: what `static_check` measures.

A kernel is a ``@triton.jit`` function of some ``gpu_align/ops/*/kernel.py`` whose name ends in ``_kernel``; it is
found there, not listed here. What cannot be found are the constants and warps that its launcher passes: a new
kernel needs one entry in `CONFIGS`, under ``operation.name``, and its arguments' types in `TYPES` where they are
neither pointers to int32 nor int32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gpu_align.ops.choose.survival import SurvivalTables
from gpu_align.ops.layout import Draft, StepState
from gpu_align.ops.step import compile_options

#: Argument name → type, in every kernel; of a named tuple those of its fields. Other names that end in ``_ptr``
#: are pointers to int32, the rest int32.
TYPES: dict[str, Any] = {
    "state": StepState._make(["*i32"] * 5 + ["*i64", "*i32", "*i32"]),
    "tables": SurvivalTables._make(["*i32", "*i32", "*fp32"]),
    "recipe_tensors": ("*i64", "*i32", "*i32", "*fp32", "*i32", "*i32"),
    "out": Draft._make(["*i64", "*i32", "*fp32", "*i8"]),
    "slots_ptr": "*i64",
    "carry_ptr": "*i8",
    "code_ptr": "*i16",
    "chunk_ptr": "*i64",
    "order_ptr": "*i64",
}


@dataclass(frozen=True)
class Config:
    """One way to compile a kernel, and its row of the table. constants: constexprs, and pointers that are None."""

    label: str
    constants: dict[str, Any]
    warps: int
    #: What differs from `TYPES` in this kernel.
    types: dict[str, str] = field(default_factory=dict)
    #: Arguments that are not multiples of 16. Pointers and strides are taken to be, as they are with PyTorch's
    #: allocator and row lengths that are multiples of 16; Triton compiles for that case apart.
    unaligned: frozenset[str] = frozenset()
    #: Of a thread, on NVIDIA; 0 leaves it to the compiler.
    max_registers: int = 0


def _lcs_planes(words: int) -> int:
    return (32 * words).bit_length() - 1


def _lcs_code() -> list[Config]:
    # Words of a panel for predictions of 1k, 4k and 16k tokens or more, as below. On AMD at most 16 warps run.
    return [
        Config(
            f"code {words}",
            {"BLOCK_B": 1, "BLOCK_T": tokens, "PLANES": _lcs_planes(words)},
            tokens // 128,
        )
        for words, tokens in ((32, 1024), (128, 4096), (512, 4096))
    ]


def _lcs_wavefront() -> list[Config]:
    # Longer predictions than 16k tokens go through in several panels, hence the last one's carry.
    found = []
    for words, name in ((32, "length"), (128, "prefix_row"), (512, "length")):
        unused = [*(["carry_ptr"] if words < 512 else []), *(["row_ptr"] if name == "length" else [])]
        sizes = {"BLOCK_B": 1, "BLOCK_W": words // 2, "PLANES": _lcs_planes(words)}
        found.append(Config(f"{name} {words}", {**sizes, **dict.fromkeys(unused)}, max(words // 64, 1)))
    return found


def _step(K: int, knows: str) -> Config:
    options = compile_options(K)
    return Config(
        f"step {K}{knows}",
        {"K": K, "BLOCK_K": max(K, 32), "HAS_SHAPES": knows == " with shapes"},
        options["num_warps"],
        unaligned=frozenset(
            {"token_ids_ptr", "stride_token_ids_s", "total_len_ptr", "slots_ptr", "num_sampled_ptr"}
        ),
        max_registers=options.get("maxnreg", 0),
    )


def _index(label: str, *pointers: str) -> list[Config]:
    # Keys of predictions whose pages have up to 131,071 tokens, and of longer ones; any alignment.
    return [
        Config(
            f"{label} {key}",
            {"BLOCK": 1024},
            4,
            {"keys_ptr": f"*{key}"},
            frozenset({"keys_ptr", *pointers}),
        )
        for key in ("i16", "i32")
    ]


#: ``operation.kernel`` → how its launcher calls it.
CONFIGS: dict[str, list[Config]] = {
    "lcs.lcs_code_kernel": _lcs_code(),
    "lcs.lcs_wavefront_kernel": _lcs_wavefront(),
    "index.index_keys_kernel": _index("index keys", "prediction_tokens_ptr"),
    "index.index_kernel": _index("index", "order_ptr", "positions_ptr", "offsets_ptr"),
    "slots.set_slot_kernel": [
        Config("set slot", {}, 1, unaligned=frozenset({"slot_meta_ptr", "align_state_ptr"}))
    ],
    "step.step_kernel": [_step(16, ""), _step(64, " with shapes"), _step(256, "")],
}
