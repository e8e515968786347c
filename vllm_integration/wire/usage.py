"""The counters of one request. The front end shows them in responses, the worker in its step log."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from gpu_align.step_log import SOURCES

#: Value of `gpu_align.Source`, and index in `SOURCES`.
PREDICTION = SOURCES.index("prediction")


@dataclass
class RequestUsage:
    """Counted from what the engine verified, not from what was proposed.

    steps: model passes that produced at least one token of the output (the first is the prefill's).
    output_tokens: tokens of the output.
    drafted_by, accepted_by: by source, the draft tokens that the engine verified, and those of them that are in
    the output. rejected = drafted − accepted.
    predicted: whether it brought a prediction.
    """

    steps: int = 0
    output_tokens: int = 0
    drafted_by: Counter[int] = field(default_factory=Counter)
    accepted_by: Counter[int] = field(default_factory=Counter)
    predicted: bool = True

    @property
    def drafted(self) -> int:
        return self.drafted_by.total()

    @property
    def accepted(self) -> int:
        return self.accepted_by.total()

    @property
    def of_prediction(self) -> tuple[int, int]:
        """Tokens of the prediction that were accepted, and that were rejected."""
        accepted = self.accepted_by[PREDICTION]
        return accepted, self.drafted_by[PREDICTION] - accepted

    def add_step(self, source: int, verified: int, accepted: int) -> None:
        """Count a step. source: value of `gpu_align.Source`."""
        self.steps += 1
        self.drafted_by[source] += verified
        self.accepted_by[source] += accepted

    def add(self, other: RequestUsage) -> None:
        """Count what another choice of the same HTTP request counted."""
        self.steps += other.steps
        self.output_tokens += other.output_tokens
        self.drafted_by.update(other.drafted_by)
        self.accepted_by.update(other.accepted_by)

    def by_source(self) -> dict[str, dict[str, int]]:
        """The sources that drafted."""
        return {
            name: {"drafted": self.drafted_by[source], "accepted": self.accepted_by[source]}
            for source, name in enumerate(SOURCES)
            if self.drafted_by[source]
        }

    def as_dict(self) -> dict[str, object]:
        return {
            "steps": self.steps,
            "output_tokens": self.output_tokens,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "rejected": self.drafted - self.accepted,
            "by_source": self.by_source(),
        }
