"""The counters of one request. The front end shows them in responses, the worker in its step log."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpu_align.step_log import SOURCES

#: Value of `gpu_align.Source`, and index in `SOURCES`.
PREDICTION = SOURCES.index("prediction")


def _zeros() -> list[int]:
    return [0] * len(SOURCES)


@dataclass
class RequestUsage:
    """Counted from what the engine verified, not from what was proposed.

    steps: model passes that produced at least one token of the output (the first is the prefill's).
    output_tokens: tokens of the output.
    drafted_by, accepted_by: by source, the draft tokens that the engine verified, and those of them that are in
    the output. rejected = drafted − accepted.
    """

    steps: int = 0
    output_tokens: int = 0
    drafted_by: list[int] = field(default_factory=_zeros)
    accepted_by: list[int] = field(default_factory=_zeros)

    @property
    def drafted(self) -> int:
        return sum(self.drafted_by)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_by)

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
        for source in range(len(SOURCES)):
            self.drafted_by[source] += other.drafted_by[source]
            self.accepted_by[source] += other.accepted_by[source]

    def by_source(self) -> dict[str, dict[str, int]]:
        """The sources that drafted."""
        return {
            name: {"drafted": drafted, "accepted": accepted}
            for name, drafted, accepted in zip(SOURCES, self.drafted_by, self.accepted_by, strict=True)
            if drafted
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
