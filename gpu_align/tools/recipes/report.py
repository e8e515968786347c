"""The worth of a pack: known outputs play the model, and a drafter drafts for them from the pack."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ...drafter.config import DrafterConfig
from ...ops.layout import Source
from ...predictors.loop import PredictorLoop
from ...recipes.pack import RecipePack
from ...recipes.tokenize import Encode, TokenTexts
from ..simulate.policies import our_drafter
from ..simulate.records import Record
from ..simulate.replay import follow

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

    def as_json(self) -> dict[str, Any]:
        """``{"num_draft_tokens", "tasks": {name: {…}}, "with_context": {…}}``."""
        parts = {"tasks": self.tasks, "with_context": self.with_context}
        each = {part: {name: t.as_json() for name, t in tasks.items()} for part, tasks in parts.items()}
        return {"num_draft_tokens": self.num_draft_tokens, **each}


def report(
    pack: RecipePack,
    outputs: Iterable[Output],
    encode: Encode,
    token_texts: TokenTexts,
    num_draft_tokens: int = 16,
    *,
    progress: Callable[[str, int], None] | None = None,
) -> PackReport:
    """Replay outputs with a pack alone, and with a drafter that has the context as well.

    encode, token_texts: as in `RecipePack.tokenize`. num_draft_tokens: K. progress: called as
    ``progress(task, 1)`` after each output.
    """
    recipes = pack.tokenize(encode, token_texts)
    records = []
    for task, prompt, output in outputs:
        before, after = encode([prompt, output])
        if len(after):
            records.append(Record(task, [int(t) for t in before], [], [int(t) for t in after]))
    found = PackReport(num_draft_tokens)
    for use_context, tasks in ((False, found.tasks), (True, found.with_context)):
        drafter = our_drafter(records, DrafterConfig(use_context=use_context), recipes)
        loop = PredictorLoop(drafter, num_draft_tokens=num_draft_tokens, strict=True)
        for record in records:
            counts = tasks.setdefault(record.id, TaskReport())
            counts.tokens += len(record.output)
            counts.steps += 1
            loop.start(record.prompt)
            for step in follow(loop, record.output):
                counts.steps += 1
                if step.source == Source.RECIPE:
                    counts.drafted += min(step.accepted + 1, len(step.draft))
                    counts.accepted += step.accepted
            if progress is not None and use_context:
                progress(record.id, 1)
    return found
