"""Deterministic replay of known outputs: how good a drafter is, measured without a GPU and without a model.

The known output stands for the model. In each step a policy drafts, the matching prefix is accepted, and one token
of the output follows; `follow` is the loop. `gpu_align.tools.simulate.replay` hands on the names of `__all__`.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import __version__
from ...predictors.base import TokenPredictor, count_accepted
from ...predictors.loop import PredictorLoop
from .. import html
from ..inputs import EditError, RecordError
from .policies import (
    NO_PACK,
    SWEEP,
    import_policy,
    make_policies,
    policy_names,
    recipes_for,
    runnable_policy_names,
    setting_name,
    tokenizer_of,
)
from .records import Record, read_records, records_of_files, records_of_git
from .tokenizers import load_tokenizer, token_texts

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "NO_PACK", "SWEEP", "EditError", "PairResult", "PolicyResult", "Record", "RecordError", "import_policy",
    "load_tokenizer", "make_policies", "policy_names", "read_records", "recipes_for", "records_of_files",
    "records_of_git", "replay", "runnable_policy_names", "setting_name", "simulate", "to_html", "to_json",
    "token_texts", "tokenizer_of",
]  # fmt: skip


class VerifiedStep(NamedTuple):
    """One verification step of an output that is known: it gave ``output[start:end]``."""

    start: int
    end: int
    draft: Sequence[int]  # the tokens that it verified, none of them after the end of the output
    #: How many of them the output has; one more is the model's own, unless the output ends there.
    accepted: int
    source: int | None = None  # of the draft, where the predictor tells it, as `confidence`
    confidence: Sequence[float] | None = None
    ns: int = 0  # what drafting took, `push_tokens` and `predict_tokens` together

    @classmethod
    def verify(cls, output: Sequence[int], start: int, draft: Sequence[int], *told: Any) -> VerifiedStep:
        """Accept of `draft` what stands in `output` at `start`. told: source, confidence, ns."""
        draft = draft[: len(output) - start]
        accepted = count_accepted(draft, output[start : start + len(draft)])
        return cls(start, min(start + accepted + 1, len(output)), draft, accepted, *told)


def follow(
    loop: PredictorLoop, output: Sequence[int], draft_in_prefill: bool = False
) -> Iterator[VerifiedStep]:
    """Let a known output play the model of a loop that has started, and yield each step once it is verified.

    The prefill gives ``output[:1]`` and is no such step; with `draft_in_prefill` it verifies a draft like any
    other. The predictor sees a token only after the step that gave it, and never those of the last step.
    """
    position = 0 if draft_in_prefill else 1
    fresh = output[:position]
    while position < len(output):
        began = time.perf_counter_ns()
        loop.push(fresh)
        draft = loop.draft(len(output) - position)
        ns = time.perf_counter_ns() - began
        told = (getattr(loop.predictor, name, None) for name in ("source", "confidence"))
        step = VerifiedStep.verify(output, position, draft, *told, ns)
        yield step
        position = step.end
        fresh = output[step.start : position]


@dataclass
class PairResult:
    """Counts of one policy on one record."""

    id: str  #: the record's
    output_tokens: int  #: L, tokens replayed
    steps: int  #: forward passes of the model, prefill included
    accepted: int  #: draft tokens that were equal to the output
    rejected: int  #: draft tokens that were not, up to the last output token
    propose_ns: list[int] = field(repr=False)  #: a step's drafting time, [steps with a draft call]
    origins: NDArray[np.uint8] = field(repr=False)  #: [L], an `Origin` a token
    step_of: NDArray[np.int32] = field(repr=False)  #: [L], the step, from 0, that produced each token
    #: Rejected draft tokens by `gpu_align.Source`, of a policy that tells its source.
    rejected_from: Counter[int] = field(default_factory=Counter)

    @classmethod
    def begin(cls, record: Record, draft_in_prefill: bool = False) -> Self:
        """Before the first step that verifies: the prefill has given a token, unless it verifies drafts, too."""
        length, steps = len(record.output), int(not draft_in_prefill)
        origins, step_of = np.full(length, html.Origin.GENERATED, np.uint8), np.zeros(length, np.int32)
        return cls(record.id, length, steps, 0, 0, [], origins, step_of)

    def count(self, step: VerifiedStep) -> None:
        """Take the next step."""
        accepted, wrong = step.accepted, len(step.draft) - step.accepted
        self.step_of[step.start : step.end] = self.steps
        self.steps += 1
        self.accepted += accepted
        self.rejected += wrong
        self.propose_ns.append(step.ns)
        origin = html.Origin.ACCEPTED if step.source is None else step.source
        self.origins[step.start : step.start + accepted] = origin
        if step.source is not None and wrong:
            self.rejected_from[step.source] += wrong


def replay(
    policy: TokenPredictor,
    record: Record,
    num_draft_tokens: int,
    draft_in_prefill: bool = False,
    progress: Callable[[int], object] | None = None,
) -> PairResult:
    """Run one policy over one record. docs/simulator.md has the loop, and what a perfect prediction takes.

    Args:
        policy: the drafter; it is reset. An error of it is raised: a figure without its drafts would mislead.
        record: what to replay. The policy gets copies: it cannot see a token that is not generated yet.
        num_draft_tokens: K; ValueError below 1.
        draft_in_prefill: let the prefill step verify drafts, as a hosted service can.
        progress: told the tokens replayed since the last call: 0 at the beginning, then every 256 steps.
    """
    told, tell = 0, progress or (lambda tokens: None)
    tell(0)
    loop = PredictorLoop(policy, num_draft_tokens=num_draft_tokens, strict=True)
    loop.start(record.prompt, record.prediction, kind=record.kind)
    result = PairResult.begin(record, draft_in_prefill)
    for step in follow(loop, record.output, draft_in_prefill):
        result.count(step)
        if result.steps % 256 == 0:
            tell(step.end - told)
            told = step.end
    loop.stop()
    tell(len(record.output) - told)
    return result


#: What is summed over pairs.
_COUNTS = ("output_tokens", "steps", "accepted", "rejected")


@dataclass
class PolicyResult:
    """Counts of one policy on all records: the sums of its pairs."""

    name: str
    pairs: list[PairResult]
    output_tokens: int = field(init=False)
    steps: int = field(init=False)
    accepted: int = field(init=False)
    rejected: int = field(init=False)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            setattr(self, name, sum(getattr(pair, name) for pair in self.pairs))

    @property
    def tokens_per_step(self) -> float:
        """``output_tokens / steps``."""
        return self.output_tokens / self.steps

    @property
    def rejected_per_accepted(self) -> float | None:
        """``rejected / accepted``; 0 where nothing was drafted, None where all drafts were rejected."""
        if self.accepted:
            return self.rejected / self.accepted
        return None if self.rejected else 0.0

    @property
    def propose_us_median(self) -> float | None:
        """Median over all steps of the time spent drafting, µs; None where no step drafted."""
        times = [ns for pair in self.pairs for ns in pair.propose_ns]
        return float(np.median(times)) / 1e3 if times else None


def simulate(
    records: Sequence[Record],
    policies: Sequence[TokenPredictor],
    num_draft_tokens: int,
    draft_in_prefill: bool = False,
    progress: Callable[[str, int], object] | None = None,
) -> list[PolicyResult]:
    """`replay` every record with every policy, in this order; one `PolicyResult` a policy.

    progress: told the policy's name and the tokens just replayed, as `replay` tells them.
    """
    results = []
    for policy in policies:
        name = policy.name or type(policy).__name__
        tell = None if progress is None else partial(progress, name)
        pairs = [replay(policy, record, num_draft_tokens, draft_in_prefill, tell) for record in records]
        results.append(PolicyResult(name, pairs))
    return results


#: A page shows the outputs of further policies as long as all of them have no more tokens than this: browsers
#: open a page of a few megabytes at once.
MAX_PAGE_TOKENS = 400_000

TABLE_HEADER = ("policy", "tokens", "steps", "tokens/step", "accepted", "rejected", "rej/acc", "µs/draft")


def to_json(
    results: Sequence[PolicyResult], num_draft_tokens: int, about: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The results as the JSON object of docs/simulator.md; `about` is what the caller knows beside them."""
    figures = (*_COUNTS, "tokens_per_step", "rejected_per_accepted", "propose_us_median")
    policies = {}
    for result in results:
        pairs = [{name: getattr(pair, name) for name in ("id", *_COUNTS)} for pair in result.pairs]
        policies[result.name] = {**{name: getattr(result, name) for name in figures}, "pairs": pairs}
    return {
        "version": __version__,
        **(about or {}),
        "num_draft_tokens": num_draft_tokens,
        "policies": policies,
    }


def verdict(results: Sequence[PolicyResult]) -> str:
    """The result in a sentence: which policy takes the fewest steps, and how many more the next one takes."""
    best, *others = sorted(results, key=lambda result: result.steps)
    told = f"{best.name}: {best.steps:,} forward passes instead of {best.output_tokens:,}"
    if not others or not best.steps:
        return f"{told}."
    more = f"{others[0].steps / best.steps - 1:.0%} more" if others[0].steps > best.steps else "as many"
    return f"{told}; {others[0].name}, the next, takes {more}."


def table_rows(results: Sequence[PolicyResult]) -> list[tuple[str, ...]]:
    """One row a policy, the fewest steps first; cells as text, in the order of `TABLE_HEADER`."""
    return [
        (
            r.name, f"{r.output_tokens:,}", f"{r.steps:,}", f"{r.tokens_per_step:.2f}", f"{r.accepted:,}",
            f"{r.rejected:,}", html.or_dash(r.rejected_per_accepted, ".2f"),
            html.or_dash(r.propose_us_median, ",.0f"),
        )
        for r in sorted(results, key=lambda result: result.steps)
    ]  # fmt: skip


def to_html(records: Sequence[Record], results: Sequence[PolicyResult], num_draft_tokens: int) -> str:
    """A page with the table, and each record's output coloured by where its tokens came from.

    Records with a tokenizer show text, the others token ids. `gpu_align` is first; the others follow in their
    order as long as there is room (`MAX_PAGE_TOKENS`).
    """
    # The sort is stable; after our name there may be settings.
    ordered = sorted(results, key=lambda result: result.name.split(" ")[0] != "gpu_align")
    used = list(itertools.accumulate(result.output_tokens for result in ordered))
    num_shown = max(1, bisect.bisect_right(used, MAX_PAGE_TOKENS))
    shown, left_out = ordered[:num_shown], [result.name for result in ordered[num_shown:]]
    present = {int(origin) for result in shown for pair in result.pairs for origin in np.unique(pair.origins)}
    parts = [
        html.note(
            f"{len(records):,} known outputs replayed with up to {num_draft_tokens} draft tokens a step. "
            "A step is one forward pass of the model; rej/acc is the number of rejected draft tokens for "
            "each accepted one."
        ),
        html.table(TABLE_HEADER, table_rows(results)),
        html.heading("Where each token came from"),
        html.legend(present),
    ]
    if left_out:
        parts.append(html.note(f"Not shown, to keep the page small: {', '.join(left_out)}."))
    for index, record in enumerate(records):
        texts = [f"{token} " for token in record.output]
        if record.tokenizer is not None:
            texts = token_texts(load_tokenizer(record.tokenizer), record.output)
        pairs = [result.pairs[index] for result in shown]
        outputs = [html.tokens(texts, pair.origins.tolist(), pair.step_of.tolist()) for pair in pairs]
        if len(shown) > 1:
            outputs = [
                html.details(result.name, _pair_note(pair), output, opened=result is shown[0])
                for result, pair, output in zip(shown, pairs, outputs, strict=True)
            ]
        note = f"{shown[0].name}: {_pair_note(pairs[0])}"
        parts.append(html.details(record.id, note, "\n".join(outputs)))
    return html.page("gpu-align simulate", parts)


def _pair_note(pair: PairResult) -> str:
    return (
        f"{pair.output_tokens:,} tokens in {pair.steps:,} steps "
        f"({pair.output_tokens / pair.steps:.1f} a step), "
        f"{pair.accepted:,} accepted, {pair.rejected:,} rejected"
    )
