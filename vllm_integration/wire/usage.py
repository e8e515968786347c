"""What a prediction was worth, counted from what the engine verified and not from what was proposed."""

from __future__ import annotations

from dataclasses import dataclass, field

SOURCES = ("none", "prediction", "context", "recipe")  # names of gpu_align.Source, in its order


@dataclass
class SourceCount:
    drafted: int = 0
    accepted: int = 0

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted


@dataclass
class RequestUsage:
    """Counters of one request.

    steps: model passes that produced at least one token of the output (the first is the prefill's).
    output_tokens: tokens of the output.
    drafted: draft tokens the engine verified; proposals it had no room to schedule are not among them.
    accepted: those of them that are in the output. rejected = drafted − accepted.
    """

    steps: int = 0
    output_tokens: int = 0
    by_source: dict[str, SourceCount] = field(default_factory=dict)

    @property
    def drafted(self) -> int:
        return sum(count.drafted for count in self.by_source.values())

    @property
    def accepted(self) -> int:
        return sum(count.accepted for count in self.by_source.values())

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted

    def of(self, source: str) -> SourceCount:
        """The count of one source; a new, empty one when it has not drafted."""
        return self.by_source.get(source, SourceCount())

    def add_step(self, *, new_tokens: int, verified: int, accepted: int, source: str) -> None:
        self.steps += 1
        self.output_tokens += new_tokens
        if verified:
            count = self.by_source.setdefault(source, SourceCount())
            count.drafted += verified
            count.accepted += accepted

    def as_dict(self) -> dict[str, object]:
        return {
            "steps": self.steps,
            "output_tokens": self.output_tokens,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "rejected": self.rejected,
            "by_source": {
                name: {"drafted": count.drafted, "accepted": count.accepted}
                for name, count in self.by_source.items()
            },
        }


@dataclass(frozen=True)
class StopRule:
    """When the engine ends a request by its tokens, so that tokens sampled after the end are not counted.

    Stop strings are found by the front end, after detokenising: tokens of the last step that follow one
    are still counted here.
    """

    stop_token_ids: frozenset[int] = frozenset()
    max_tokens: int | None = None

    def kept(self, sampled: list[int], output_len: int) -> int:
        """How many of `sampled` belong to the output that has `output_len` tokens before them."""
        kept = len(sampled)
        if self.max_tokens is not None:
            kept = max(0, min(kept, self.max_tokens - output_len))
        if self.stop_token_ids:
            for index in range(kept):
                if sampled[index] in self.stop_token_ids:
                    return index + 1
        return kept

    def ends(self, kept: list[int], output_len: int) -> bool:
        """Whether the output is complete with `kept` appended to `output_len` tokens."""
        if self.max_tokens is not None and output_len + len(kept) >= self.max_tokens:
            return True
        return bool(kept) and kept[-1] in self.stop_token_ids
