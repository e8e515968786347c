"""What was measured, and the JSON that is made of it."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpu_align.bench.identity import Verdict
from gpu_align.bench.metrics import Counts
from gpu_align.bench.plan import Turn

PERCENTILES = (50, 90, 99)


@dataclass
class Sample:
    """One turn: a mode at a concurrency in one round.

    Attributes:
        turn: which.
        requests: answered requests.
        seconds: wall time from the first request to the last answer.
        output_tokens: of all answers.
        ttft_s: one a request.
        token_gaps_s: inter-token latencies, see `client.Answer.token_gaps_s`.
        piece_gaps_s: the time before each piece after the first, as a reader sees it.
        counts: what `/metrics` counted meanwhile; None without one.
        usage: accepted and rejected prediction tokens by `usage`; None where no answer had them.
        different: (pair, text) of each answer that is not the first run's.
    """

    turn: Turn
    requests: int = 0
    seconds: float = 0.0
    output_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    token_gaps_s: list[float] = field(default_factory=list)
    piece_gaps_s: list[float] = field(default_factory=list)
    counts: Counts | None = None
    usage: tuple[int, int] | None = None
    different: list[tuple[int, str]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all streams a second."""
        return self.output_tokens / self.seconds

    @property
    def steps(self) -> int:
        """Verification steps. vLLM's own drafts are not counted by step; no step sends more than one piece."""
        found = 0 if self.counts is None else self.counts.steps
        exact = self.counts is None or self.counts.has_plugin or not self.counts.vllm_drafts
        return found if exact else max(found, self.requests + len(self.piece_gaps_s))


@dataclass
class Result:
    """All that a run knows; a file and a page can be made of it at any moment.

    Attributes:
        about: version, model, tokenizer, servers, settings, data.
        samples: finished turns.
        verdicts: of each different (pair, text), once it has been checked.
        notes: sentences that a reader must know.
        complete: whether all turns are there.
    """

    about: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    verdicts: dict[tuple[int, str], Verdict] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    complete: bool = False

    def note(self, text: str) -> None:
        """Add a sentence, once."""
        if text not in self.notes:
            self.notes.append(text)

    def runs(self) -> list[dict[str, Any]]:
        """Return one object a mode and concurrency, all rounds together."""
        modes = list(dict.fromkeys(self.about.get("settings", {}).get("modes", ())))
        found = {(sample.turn.mode, sample.turn.concurrency) for sample in self.samples}
        order = sorted(found, key=lambda key: (key[1], modes.index(key[0]) if key[0] in modes else 0))
        return [self._run(mode, concurrency) for mode, concurrency in order]

    def as_json(self) -> dict[str, Any]:
        """Return the whole result, without dates and without any text of a request."""
        return {**self.about, "complete": self.complete, "notes": self.notes, "runs": self.runs()}

    def write_json(self, path: Path) -> None:
        """Write `as_json` to a file."""
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    def _run(self, mode: str, concurrency: int) -> dict[str, Any]:
        samples = [s for s in self.samples if (s.turn.mode, s.turn.concurrency) == (mode, concurrency)]
        tokens = sum(sample.output_tokens for sample in samples)
        seconds = sum(sample.seconds for sample in samples)
        different = [key for sample in samples for key in sample.different]
        near = sum(self.verdicts.get(key) == "near-tie" for key in different)
        run: dict[str, Any] = {
            "mode": mode,
            "concurrency": concurrency,
            "requests": sum(sample.requests for sample in samples),
            "output_tokens": tokens,
            "tokens_per_s": round(tokens / seconds, 2),
            "ttft_ms": _percentiles([s for sample in samples for s in sample.ttft_s]),
            "itl_ms": _percentiles([s for sample in samples for s in sample.token_gaps_s]),
            **_drafts(samples),
            "identical": self._identical(different),
        }
        run |= {
            "different": len(different),
            "near_ties": near,
            "piece_ms": _percentiles([s for sample in samples for s in sample.piece_gaps_s]),
            "speed_up": self._speed_up(samples),
            "rounds": [{"seconds": round(s.seconds, 4), "output_tokens": s.output_tokens} for s in samples],
        }
        return run

    def _identical(self, different: Sequence[tuple[int, str]]) -> Verdict | None:
        """The worst verdict of all answers; None while one has not been checked."""
        verdicts = {self.verdicts.get(key) for key in different}
        if "no" in verdicts:
            return "no"
        return None if None in verdicts else "near-tie" if verdicts else "yes"

    def _speed_up(self, samples: Sequence[Sample]) -> dict[str, float] | None:
        """Tokens a second as a multiple of mode none in the same round: median, least, largest."""
        none = {
            (s.turn.round, s.turn.concurrency): s.tokens_per_s for s in self.samples if s.turn.mode == "none"
        }
        keys = [(sample.turn.round, sample.turn.concurrency) for sample in samples]
        ratios = [s.tokens_per_s / none[key] for s, key in zip(samples, keys, strict=True) if key in none]
        if not ratios or samples[0].turn.mode == "none":
            return None
        values = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        return {name: round(value, 4) for name, value in values.items()}


def _drafts(samples: Sequence[Sample]) -> dict[str, Any]:
    """Steps, accepted and rejected draft tokens: of `/metrics`, else of `usage`, else None."""
    counts = [sample.counts for sample in samples]
    if all(count is not None for count in counts):
        known = [count for count in counts if count is not None]
        sources: dict[str, Counter[str]] = {}
        for count in known:
            for source, verdicts in count.by_source().items():
                sources.setdefault(source, Counter()).update(verdicts)
        return {
            "steps": sum(sample.steps for sample in samples),
            "accepted": sum(count.accepted for count in known),
            "rejected": sum(count.rejected for count in known),
            "by_source": {source: dict(verdicts) for source, verdicts in sources.items()},
        }
    usages = [sample.usage for sample in samples]
    if any(usage is not None for usage in usages):
        accepted, rejected = (sum(usage[i] for usage in usages if usage is not None) for i in (0, 1))
        return {"steps": None, "accepted": accepted, "rejected": rejected}
    return {"steps": None, "accepted": None, "rejected": None}


def _percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p90, p99 in milliseconds; None without values."""
    if not seconds:
        return {f"p{p}": None for p in PERCENTILES}
    found: Iterator[float] = iter(np.percentile(seconds, PERCENTILES).tolist())
    return {f"p{p}": round(value * 1000, 3) for p, value in zip(PERCENTILES, found, strict=True)}
