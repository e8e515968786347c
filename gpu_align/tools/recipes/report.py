"""What a pack is worth: known outputs play the model, and a drafter drafts for them from the pack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...config import DrafterConfig
from ...drafter import Drafter
from ...ops.draft import Source
from ...ops.recipe_lookup import Recipes
from ...recipes.misses import Misses, count_misses
from ...recipes.tokenize import Encode

#: A task, a prompt, and what a model answered.
Output = tuple[str, str, str]

#: Tokens a step on tasks as recipe speculative decoding was published with, and coverage and accuracy of all.
#: Source: https://kolm.ai/articles/speculative-decoding-recipes
PUBLISHED = {"JSON extraction": 4.2, "Python": 3.1, "maths": 2.4, "free prose": 1.3}
PUBLISHED_COVERAGE, PUBLISHED_ACCURACY = (0.5, 0.8), (0.999, 1.0)


@dataclass
class TaskReport:
    """What recipes did on the outputs of a task.

    Attributes:
        tokens: of the outputs.
        drafted: recipe tokens that were verified, up to the first of a draft that was refuted.
        accepted: those of them that the output has.
        steps: forward passes, the prefill included.
        other: accepted tokens that were not drafted by recipes.
    """

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    other: int = 0

    @property
    def coverage(self) -> float:
        """The share of the output tokens that recipes drafted."""
        return self.drafted / self.tokens if self.tokens else 0.0

    @property
    def accuracy(self) -> float:
        """The share of those that were accepted; 1 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 1.0

    @property
    def tokens_per_step(self) -> float:
        """Output tokens a forward pass."""
        return self.tokens / self.steps if self.steps else 0.0

    def as_json(self) -> dict[str, float]:
        """The fields of the file."""
        return {
            "tokens": self.tokens,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "coverage": self.coverage,
            "accuracy": self.accuracy,
            "tokens_per_step": self.tokens_per_step,
        }


@dataclass
class Report:
    """What recipes did, by task.

    Attributes:
        num_draft_tokens: K.
        tasks: with the pack alone.
        with_context: with the whole drafter, which drafts from the prompt and the output as well.
    """

    num_draft_tokens: int
    tasks: dict[str, TaskReport] = field(default_factory=dict)
    with_context: dict[str, TaskReport] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """``{"num_draft_tokens", "tasks": {name: {…}}, "with_context": {name: {…}}}``."""
        return {
            "num_draft_tokens": self.num_draft_tokens,
            "tasks": {name: task.as_json() for name, task in self.tasks.items()},
            "with_context": {name: task.as_json() for name, task in self.with_context.items()},
        }


class _Text(NamedTuple):
    task: str
    prompt: Sequence[int]
    output: Sequence[int]


def report(
    recipes: Recipes,
    outputs: Iterable[Output],
    encode: Encode,
    num_draft_tokens: int,
    misses: Misses | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Report:
    """See `RecipePack.report`."""
    texts = []
    for task, prompt, output in outputs:
        before, after = encode([prompt, output])
        if len(after):
            texts.append(_Text(task, [int(t) for t in before], [int(t) for t in after]))
    found = Report(num_draft_tokens)
    for use_context, tasks in ((False, found.tasks), (True, found.with_context)):
        replay = _Replay(recipes, texts, num_draft_tokens, use_context)
        for text in texts:
            replay.run(text, tasks.setdefault(text.task, TaskReport()), None if use_context else misses)
            if progress is not None and use_context:
                progress(text.task, 1)
    return found


class _Replay:
    """A drafter with one slot, and the tensors of an engine."""

    def __init__(
        self, recipes: Recipes, texts: Sequence[_Text], num_draft_tokens: int, use_context: bool
    ) -> None:
        length = max((len(text.prompt) + len(text.output) for text in texts), default=1)
        ids = [max((*text.prompt, *text.output)) for text in texts]
        ids += [int(recipes.token_ids.max())] if len(recipes) else []
        self._recipes = recipes
        self._drafter = Drafter(
            max_slots=1,
            max_context_len=length,
            max_prediction_len=1,
            num_draft_tokens=num_draft_tokens,
            vocab_size=max(ids, default=0) + 1,
            device="cpu",
            config=DrafterConfig(use_context=use_context),
            recipes=recipes,
        )
        self._token_ids = torch.zeros((1, length), dtype=torch.int32)
        self._total_len = torch.zeros(1, dtype=torch.int32)
        self._slots = torch.zeros(1, dtype=torch.int64)

    def run(self, text: _Text, counts: TaskReport, misses: Misses | None) -> None:
        """Replay one output: the prefill gives its first token, each step those accepted and one more."""
        self._drafter.add(0, [], len(text.prompt))
        counts.tokens += len(text.output)
        counts.steps += 1
        position = 1
        for draft, source in self._drafts(text):
            draft = draft[: len(text.output) - position]
            wrote = text.output[position : position + len(draft)]
            accepted = next((k for k, token in enumerate(draft) if token != wrote[k]), len(draft))
            if source == Source.RECIPE:
                counts.drafted += min(accepted + 1, len(draft))
                counts.accepted += accepted
                if misses is not None:
                    before = [*text.prompt, *text.output[:position]]
                    count_misses(misses, before, position, draft, wrote, self._recipes.shape_of)
            else:
                counts.other += accepted
            counts.steps += 1
            position = min(position + accepted + 1, len(text.output))
            self._position = position

    def _drafts(self, text: _Text) -> Iterator[tuple[list[int], int]]:
        """A draft and its source for each step."""
        begin, written = len(text.prompt), 0
        row = self._token_ids.numpy()[0]
        row[:begin] = text.prompt
        self._position = 1
        while self._position < len(text.output):
            row[begin + written : begin + self._position] = text.output[written : self._position]
            sampled = torch.tensor([self._position - written], dtype=torch.int32)
            written = self._position
            self._total_len[0] = begin + written
            draft = self._drafter.propose(self._token_ids, self._total_len, self._slots, sampled)
            yield draft.token_ids[0, : int(draft.length[0])].tolist(), int(draft.source[0])
