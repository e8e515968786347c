"""The worth of a pack: known outputs play the model, and a drafter drafts for them from the pack."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ...config import DrafterConfig
from ...ops.layout import Source
from ...predictors.base import TokenPredictor
from ...predictors.draft_model import DraftModelTokenPredictor
from ...predictors.loop import PredictorLoop
from ...recipes.pack import RecipePack
from ...recipes.tokenize import Encode, TokenTexts
from ..simulate.policies import our_drafter
from ..simulate.records import Record
from .misses import Misses, count_misses

#: A task, a prompt, and what a model answered.
Output = tuple[str, str, str]


@dataclass
class TaskReport:
    """Counts of recipe drafts on the outputs of a task."""

    tokens: int = 0  # of the outputs
    drafted: int = 0  # recipe tokens that were verified, up to the first of a draft that was refuted
    accepted: int = 0  # those of them that the output has
    steps: int = 0  # forward passes, the prefill included

    @property
    def coverage(self) -> float:
        """The share of the output tokens that recipes drafted."""
        return self.drafted / self.tokens if self.tokens else 0.0

    @property
    def accuracy(self) -> float | None:
        """The share of those that were accepted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_step(self) -> float:
        """Output tokens a forward pass."""
        return self.tokens / self.steps if self.steps else 0.0

    def as_json(self) -> dict[str, float | None]:
        names = ("tokens", "drafted", "accepted", "coverage", "accuracy", "tokens_per_step")
        return {name: getattr(self, name) for name in names}


@dataclass
class PackReport:
    """Counts of recipe drafts, by task."""

    num_draft_tokens: int  #: K
    tasks: dict[str, TaskReport] = field(default_factory=dict)  #: with the pack alone
    #: With the whole drafter, which drafts from the prompt and the output as well.
    with_context: dict[str, TaskReport] = field(default_factory=dict)
    #: With the draft model alone, where there is one; its tokens count as those of recipes do.
    draft_model: dict[str, TaskReport] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """``{"num_draft_tokens", "tasks": {name: {…}}, "with_context": {…}}``, and ``"draft_model"`` if any."""
        parts = {"tasks": self.tasks, "with_context": self.with_context}
        if self.draft_model:
            parts["draft_model"] = self.draft_model
        each = {part: {name: t.as_json() for name, t in tasks.items()} for part, tasks in parts.items()}
        return {"num_draft_tokens": self.num_draft_tokens, **each}


def report(
    pack: RecipePack,
    outputs: Iterable[Output],
    encode: Encode,
    token_texts: TokenTexts,
    num_draft_tokens: int = 16,
    *,
    misses: Misses | None = None,
    progress: Callable[[str, int], None] | None = None,
    draft_model: DraftModelTokenPredictor | None = None,
) -> PackReport:
    """Replay outputs with a pack alone, and with a drafter that has the context as well.

    Args:
        outputs: ``(task, prompt, output)`` each.
        encode, token_texts, num_draft_tokens: as in `RecipePack.tokenize`; K.
        misses: counts the tokens that were refuted and accepted with the pack alone.
        progress: called as ``progress(task, 1)`` after each output.
        draft_model: a predictor to replay them with as well.
    """
    recipes = pack.tokenize(encode, token_texts)
    records = []
    for task, prompt, output in outputs:
        before, after = encode([prompt, output])
        if len(after):
            records.append(Record(task, [int(t) for t in before], [], [int(t) for t in after]))
    found = PackReport(num_draft_tokens)
    runs: list[tuple[dict[str, TaskReport], TokenPredictor]] = [
        (tasks, our_drafter(records, DrafterConfig(use_context=use_context), recipes))
        for use_context, tasks in ((False, found.tasks), (True, found.with_context))
    ]
    if draft_model is not None:
        vocab_size = draft_model.model.config.get_text_config().vocab_size
        most = max((max([*record.prompt, *record.output]) for record in records), default=0)
        if most >= vocab_size:
            raise ValueError(
                f"draft model: expected the tokenizer's tokens, found {vocab_size} and not {most}"
            )
        runs.append((found.draft_model, draft_model))
    for tasks, drafter in runs:
        loop = PredictorLoop(drafter, num_draft_tokens=num_draft_tokens, strict=True)
        for record in records:
            counts = tasks.setdefault(record.id, TaskReport())
            counts.tokens += len(record.output)
            counts.steps += 1
            loop.start(record.prompt)
            for step in loop.follow(record.output):
                counts.steps += 1
                if step.source != Source.RECIPE and drafter is not draft_model:
                    continue
                counts.drafted += min(step.accepted + 1, len(step.draft))
                counts.accepted += step.accepted
                if misses is not None and tasks is found.tasks:
                    before = [*record.prompt, *record.output[: step.start]]
                    wrote = record.output[step.start : step.start + len(step.draft)]
                    count_misses(misses, before, step.start, step.draft, wrote, recipes.shape_of)
            if progress is not None and drafter is runs[-1][1]:
                progress(record.id, 1)
    return found
