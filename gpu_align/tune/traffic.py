"""What a table is learned from: known outputs with their predictions, from step logs or from a file of pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_align import step_log
from gpu_align.simulate.records import Record, read_records

_LOG_ENDINGS = (".yaml", ".yml")


@dataclass
class Traffic:
    """Requests that can be replayed.

    Attributes:
        records: one a request, ids as they were logged.
        skipped: reasons why others cannot be, and how many.
    """

    records: list[Record] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, other: Traffic) -> None:
        """Take in the requests of `other`."""
        self.records += other.records
        self.skipped += other.skipped

    @property
    def num_tokens(self) -> int:
        """Output tokens."""
        return sum(len(record.output) for record in self.records)


def files_of(places: Sequence[Path]) -> list[Path]:
    """The files that are given, and the step logs in the folders that are given, sorted.

    Raises:
        FileNotFoundError: a place that is not there, or a folder without step logs.
    """
    files: list[Path] = []
    for place in places:
        if place.is_dir():
            found = sorted(p for p in place.rglob("*") if p.suffix in _LOG_ENDINGS and p.is_file())
            if not found:
                raise FileNotFoundError(f"{place}: expected step logs (*.yaml) in this folder, found none")
            files += found
        elif place.exists():
            files.append(place)
        else:
            raise FileNotFoundError(f"{place}: no such file or folder")
    return files


def read_traffic(files: Iterable[Path], tokenizer: str | None = None) -> Traffic:
    """Read step logs and files of pairs.

    A step log is one request: its prediction and its output are in it. It has no tokens of the prompt, so drafts
    from the prompt are not seen. Logs without a prediction, and torn ones, are skipped and counted.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file of pairs that is none (`RecordError`).
        MissingExtraError: PyYAML, or a tokenizer's package, is not installed.
    """
    traffic = Traffic()
    for file in files:
        if file.suffix not in _LOG_ENDINGS:
            for record in read_records(file, tokenizer):
                _add(traffic, record)
            continue
        try:
            log = step_log.read_step_log(file)
        except step_log.StepLogError:
            traffic.skipped["not a whole step log"] += 1
            continue
        record_or_reason = record_of(log)
        if isinstance(record_or_reason, str):
            traffic.skipped[record_or_reason] += 1
        else:
            _add(traffic, record_or_reason)
    return traffic


def record_of(log: Any) -> Record | str:
    """The request of a `StepLog` as it can be replayed, or why it cannot."""
    output = [token for step in log.steps for token in step.new]
    lines = getattr(log, "prediction_lines", None)
    if any(step.source == "memory" for step in log.steps):
        return "drafts from earlier answers"
    if not log.prediction_tokens:
        return "no prediction"
    if lines is None:
        return "the log does not hold the prediction"
    prediction = [token for line in lines for token in line.tokens]
    if len(prediction) != log.prediction_tokens:
        return "the log does not hold the whole prediction"
    if not output:
        return "no output"
    return Record(log.request_id, [], prediction, output)


def _add(traffic: Traffic, record: Record) -> None:
    if record.prediction:
        traffic.records.append(record)
    else:
        traffic.skipped["no prediction"] += 1
