"""Cycles of a step from the compiled code, without a GPU: docs/developer/compiled-kernels.md.

The step is compiled as its launcher calls it and run by the emulator (`sass_warp`) on requests in the states of
`PATHS`, in a drafter that has recipes. Drafts must be the reference's. sm_100 has its own code, but sm_90's
latencies. Not in it: misses of the instruction cache, other programs on the multiprocessor, queues of the memory.

The model goes once a GPU has timed a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import typer

from benchmarks.alignment.workload import NUM_DRAFT_TOKENS, VOCAB_SIZE, make_recipes, make_texts
from benchmarks.compiled import static_check
from benchmarks.compiled.launches import Launch, in_place_of_triton
from benchmarks.compiled.sass import disassemble
from benchmarks.compiled.sass_warp import Latencies, Machine, Trace
from benchmarks.tables import RESULTS
from gpu_align import Drafter
from gpu_align.ops.step import StepLaunch

NUM_TEXT = 32_768
Tokens = npt.NDArray[np.int32]


class Situation(NamedTuple):
    """A request before and after the tokens of a step.

    output: its tokens, as far as they are written after the step. steps: lengths of the output at which steps ran
    before.
    """

    prediction: Tokens
    output: Tokens
    steps: tuple[int, ...]
    prompt: Tokens = np.zeros(0, np.int32)


#: The last token of every output: one that each text of `make_texts` has about 330 times, more than are looked at.
OFTEN = 7


def aligned(new: int) -> Situation:
    """In sync since its beginning, `new` tokens more."""
    texts = make_texts(1, NUM_TEXT, "aligned")
    prediction = texts.predictions[0].copy()
    prediction[texts.done + new - 1] = OFTEN
    return Situation(prediction, prediction[: texts.done + new], (texts.done,))


def lost(new: int, done: int) -> Situation:
    """Diverged at once and never in sync again: `done` tokens, and `new` more."""
    texts = make_texts(1, NUM_TEXT, "lost")
    output = texts.outputs[0][: done + new].copy()
    output[-1] = OFTEN
    return Situation(texts.predictions[0], output, (done,) if done else ())


def repeated(new: int) -> Situation:
    """Lost, and its last 64 tokens were written 200 tokens ago: the longest match, in its own context."""
    path = lost(new, NUM_TEXT // 2)
    path.output[-201] = OFTEN
    path.output[-64 - new :] = path.output[-264 - new : -200]
    return path


def edited(new: int) -> Situation:
    """Four edits of two tokens each were made; in sync again, `new` tokens more."""
    path = aligned(new)
    output = path.output.copy()
    end = len(output) - new
    for at in range(end - 200, end - 40, 40):
        output[at : at + 2] = 50_000 + at
    return Situation(path.prediction, output, tuple(range(end - 208, end + 1, 8)))


def resynced(new: int) -> Situation:
    """The first two of `new` tokens differ from the prediction; then it is in sync again: an edit is recorded."""
    path = aligned(new)
    output = path.output.copy()
    output[-new : 2 - new] = 50_000
    return path._replace(output=output)


def first_step(num_prompt: int, is_prepared: bool) -> Situation:
    """The first step after a prompt; one token is written, the prediction's first."""
    texts = make_texts(1, NUM_TEXT, "lost")
    prediction = texts.predictions[0].copy()
    prediction[0] = OFTEN
    return Situation(prediction, prediction[:1], (0,) if is_prepared else (), texts.outputs[0][:num_prompt])


#: Name → the path. The global resync runs at every eighth token: from 16,385 on at 16,392.
PATHS: dict[str, Callable[[], Situation]] = {
    "aligned, 1 new": lambda: aligned(1),
    "aligned, 17 new": lambda: aligned(17),
    "aligned after edits, 8 new": lambda: edited(8),
    "diverged and resynced, 8 new": lambda: resynced(8),
    "lost, 1 new, local resync": lambda: lost(1, NUM_TEXT // 2),
    "lost, 1 new, global resync": lambda: lost(1, NUM_TEXT // 2 + 7),
    "lost, 17 new": lambda: lost(17, NUM_TEXT // 2),
    "lost, 17 new, 64 match in the context": lambda: repeated(17),
    "first step, prompt of 32k": lambda: first_step(NUM_TEXT - 32, is_prepared=False),
    "first step, prompt of 32k, prepared": lambda: first_step(NUM_TEXT - 32, is_prepared=True),
    "resume, 8k lost tokens, prepared": lambda: lost(1, 8192),
}
#: All lost tokens are processed again. Two shorter lengths are run, and further tokens take as long.
RESUME, NUM_LOST, RUN = "resume, 8k lost tokens", 8192, (128, 192)

TARGETS = ("sm_90", "sm_100")
GIGAHERTZ = 1.755
WARM, COLD = Latencies(), Latencies(first=600)
TABLE = RESULTS / "latency.json"
#: What a number may differ by from the table's.
TOLERANCE = 0.02


class Case:
    """A path as a drafter sees it, before its last step."""

    def __init__(self, path: Situation) -> None:
        length = NUM_TEXT + NUM_DRAFT_TOKENS
        self.drafter = Drafter(
            max_slots=1, max_context_len=length, max_prediction_len=NUM_TEXT,
            num_draft_tokens=NUM_DRAFT_TOKENS, vocab_size=VOCAB_SIZE, device="cpu", backend="reference",
            recipes=make_recipes(),
        )  # fmt: skip
        self.drafter.add(0, path.prediction, len(path.prompt))
        tokens = np.concatenate([path.prompt, path.output])
        self.tensors = (
            torch.zeros((1, length), dtype=torch.int32), torch.zeros(1, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32),
        )  # fmt: skip
        self.tensors[0][0, : len(tokens)] = torch.from_numpy(tokens)
        for written in path.steps:
            self.tensors[1].fill_(len(path.prompt) + written)
            self.drafter.propose(*self.tensors)
        self.tensors[1].fill_(len(tokens))

    def run(self, target: str, latencies: Latencies) -> Trace:
        """The compiled step; its drafts have to be the reference's. The case stays as it is."""
        drafter = self.drafter
        state, draft = drafter._state, drafter._draft
        before = [tensor.clone() for tensor in state]
        traces = []

        def take(launch: Launch) -> None:
            compiled = launch.compiled
            with launch.in_memory(target) as (memory, bank):
                program, num_warps = disassemble(compiled.asm["cubin"]), compiled.metadata.num_warps
                traces.append(Machine(program, memory, bank, num_warps, latencies).run())

        def drafts() -> list[torch.Tensor]:
            """Of the step that ran; the state is then as before."""
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)
            return [tensor.clone() for tensor in draft]

        with in_place_of_triton(target, take):
            StepLaunch(state, drafter._tables, drafter._recipes, draft, drafter._settings)(*self.tensors)
        found = drafts()
        drafter.propose(*self.tensors)
        for name, mine, expected in zip(draft._fields, found, drafts(), strict=True):
            assert torch.equal(mine, expected), f"{name}: expected {expected}, found {mine}"
        [trace] = traces
        return trace


def measure(name: str, target: str) -> dict[str, float]:
    """Cycles, with all data in the second-level cache (warm) or in memory (cold), and instructions."""

    def run(path: Situation) -> dict[str, int]:
        case = Case(path)
        warm, cold = (case.run(target, costs) for costs in (WARM, COLD))
        return {"warm": warm.cycles, "cold": cold.cycles, "instructions": warm.instructions}

    if name in PATHS:
        return run(PATHS[name]())
    a, b = (run(lost(length, 0)) for length in RUN)
    return {key: round(a[key] + (b[key] - a[key]) * (NUM_LOST - RUN[0]) / (RUN[1] - RUN[0])) for key in a}


def _cell(row: dict[str, Any]) -> str:
    us = " / ".join(f"{row[key] / GIGAHERTZ / 1e3:,.1f}" for key in ("warm", "cold"))
    return f"{row['warm']:,} cycles, {us} µs"


def main(
    renew: Annotated[bool, typer.Option("--write", help="renew the table of the installed Triton")] = False,
) -> None:
    """Run the compiled step on recorded requests and compare its cycles with the committed table."""
    static_check.uninterpreted()
    table = {name: {target: measure(name, target) for target in TARGETS} for name in (*PATHS, RESUME)}
    typer.echo(f"warm / cold at {GIGAHERTZ} GHz\n\n{static_check.markdown(table, _cell)}")
    static_check.settle(table, TABLE, renew, tolerance=TOLERANCE)


if __name__ == "__main__":
    typer.run(main)
