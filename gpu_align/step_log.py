"""The step log of one request: its types, and how a file is written and read.

A step log says what happened in each verification step of one request. The vLLM plugin writes one YAML file a
request; `gpu-align report` and the demo read it. `docs/logs.md` describes every field. Only `dump` and
`read_step_log` need PyYAML.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpu_align.errors import MissingExtraError

FORMAT = "gpu-align-steps/1"
#: Names of `gpu_align.Source`, in its order.
SOURCES = ("none", "prediction", "context", "recipe", "memory")

#: Tokens before a text that it is decoded with: leading spaces and torn characters depend on them.
_TEXT_CONTEXT = 8
_TORN = "\ufffd"  # what a decoder writes for a character of which a later token has the rest

#: Token ids -> text.
Decode = Callable[[list[int]], str]


class StepLogError(ValueError):
    """A file is not a whole step log; the message names the place and what was expected there."""


@dataclass(frozen=True)
class Step:
    """One verification step; the fields of the file, in its order. None stands for what a file lacks.

    Attributes:
        step: its number, from 0.
        position: tokens before it, prompt and output.
        source: one of `SOURCES`, of what was proposed.
        proposed: the draft's token ids.
        confidence: the drafter's confidence in each of them.
        duration_us: drafting time, µs.
        verified: the number of drafts that the engine verified; ``accepted <= verified <= len(proposed)``.
        accepted: the number of drafts that are in the output.
        new: the output's tokens of this step: the accepted drafts, then the model's own.
        cursor_before: where the output stood in the prediction when the draft was made.
        cursor_after: the same with the new tokens.
        candidate: what was drafted from and why, fields of `gpu_align.explain.Candidate`.
        others: the number of candidates that were not chosen.
        proposed_text: text of `proposed`.
        accepted_text: text of the accepted drafts.
        own_text: text of the model's own tokens.
    """

    step: int
    position: int
    source: str
    proposed: list[int]
    confidence: list[float]
    duration_us: int
    verified: int
    accepted: int
    new: list[int]
    cursor_before: int | None = None
    cursor_after: int | None = None
    candidate: dict[str, Any] | None = None
    others: int = 0
    proposed_text: str | None = None
    accepted_text: str | None = None
    own_text: str | None = None

    @property
    def rejected(self) -> int:
        return self.verified - self.accepted


@dataclass(frozen=True)
class StepLog:
    """One request."""

    request_id: str
    num_draft_tokens: int
    prompt_tokens: int
    prediction_tokens: int
    steps: list[Step]

    @property
    def output_tokens(self) -> int:
        return sum(len(step.new) for step in self.steps)

    @property
    def drafted(self) -> int:
        return sum(step.verified for step in self.steps)

    @property
    def accepted(self) -> int:
        return sum(step.accepted for step in self.steps)

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted

    def usage(self) -> dict[str, Any]:
        """The counts of all steps, as the file has them; `by_source` lists the sources that drafted."""
        by_source: dict[str, dict[str, int]] = {}
        for step in self.steps:
            if step.verified:
                count = by_source.setdefault(step.source, {"drafted": 0, "accepted": 0})
                count["drafted"] += step.verified
                count["accepted"] += step.accepted
        counts = {name: getattr(self, name) for name in ("output_tokens", "drafted", "accepted", "rejected")}
        return {"steps": len(self.steps), **counts, "by_source": by_source}

    def with_texts(self, decode: Decode, prompt: Sequence[int] = ()) -> StepLog:
        """This log with the texts of its tokens. prompt: the tokens before the first step."""
        before = list(prompt[-_TEXT_CONTEXT:])
        steps = []
        for step in self.steps:
            accepted, own = step.new[: step.accepted], step.new[step.accepted :]
            texted = replace(
                step,
                proposed_text=_text_after(decode, before, step.proposed),
                accepted_text=_text_after(decode, before, accepted),
                own_text=_text_after(decode, (before + accepted)[-_TEXT_CONTEXT:], own),
            )
            steps.append(texted)
            before = (before + step.new)[-_TEXT_CONTEXT:]
        return replace(self, steps=steps)


def _text_after(decode: Decode, before: list[int], tokens: list[int]) -> str:
    """What `tokens` add to the text of `before`; a character of several tokens belongs to the last of them."""
    known, whole = decode(before).rstrip(_TORN), decode(before + tokens).rstrip(_TORN)
    return whole[len(known) :]


def dump(log: StepLog) -> str:
    """The file of `log`; a step without texts has no keys for them."""
    import yaml

    header = {name: value for name, value in vars(log).items() if name != "steps"}
    steps = [
        {name: value for name, value in vars(step).items() if value is not None or not name.endswith("_text")}
        for step in log.steps
    ]
    document = {"format": FORMAT, **header, "usage": log.usage(), "steps": steps}
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(
        document, Dumper=dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=100
    )
    return text


def read_step_log(path: Path) -> StepLog:
    """Read a file that the plugin wrote.

    Raises:
        OSError: the file cannot be read.
        StepLogError: the file is not YAML, or not a whole step log.
        MissingExtraError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError("gpu-align report", "PyYAML", "vllm") from error
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    except UnicodeDecodeError as error:
        raise StepLogError(f"expected UTF-8 text, found another byte at {error.start}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise StepLogError(
            f"{place}expected YAML: {getattr(error, 'problem', None) or 'torn file'}"
        ) from None
    except RecursionError:
        raise StepLogError("expected a step log, found YAML nested too deeply") from None
    return _log(document)


def _log(document: Any) -> StepLog:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise StepLogError(f"format: expected {FORMAT!r}, found {str(found)[:40]!r}")
    field = partial(_field, "", document)
    rows = field("steps", list)
    counts = {name: field(name, int) for name in ("num_draft_tokens", "prompt_tokens", "prediction_tokens")}
    steps = [_step(f"steps[{index}]", row) for index, row in enumerate(rows)]
    return StepLog(field("request_id", str), **counts, steps=steps)


def _step(where: str, row: Any) -> Step:
    field = partial(_field, where, row)
    names = ("step", "position", "duration_us", "verified", "accepted")
    values = {name: field(name, int) for name in names}
    values |= {name: field(name, list) for name in ("proposed", "confidence", "new")}
    for name in ("proposed", "new"):
        for index, token in enumerate(values[name]):
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise StepLogError(f"{where}.{name}[{index}]: expected a token id, found {str(token)[:20]!r}")
    for index, number in enumerate(values["confidence"]):
        if not isinstance(number, (int, float)):
            raise StepLogError(f"{where}.confidence[{index}]: expected a number, found {str(number)[:20]!r}")
    source = field("source", str)
    if source not in SOURCES:
        raise StepLogError(f"{where}.source: expected one of {', '.join(SOURCES)}, found {source[:20]!r}")
    optional = {"cursor_before": int, "cursor_after": int, "candidate": dict, "others": int}
    optional |= dict.fromkeys(("proposed_text", "accepted_text", "own_text"), str)
    values |= {name: field(name, kind) for name, kind in optional.items() if row.get(name) is not None}
    step = Step(source=source, **values)
    if not step.accepted <= step.verified <= len(step.proposed):
        raise StepLogError(
            f"{where}: expected accepted <= verified <= proposed tokens, found "
            f"{step.accepted}, {step.verified}, {len(step.proposed)}"
        )
    if step.accepted > len(step.new):
        raise StepLogError(
            f"{where}.new: expected at least the {step.accepted} accepted tokens, found {len(step.new)}"
        )
    return step


def _field(where: str, row: Any, name: str, kind: type[Any]) -> Any:
    place = f"{where}.{name}" if where else name
    if not isinstance(row, dict):
        raise StepLogError(f"{where}: expected a mapping, found {type(row).__name__}")
    if name not in row:
        raise StepLogError(f"{place}: expected, but missing; is the file whole?")
    value = row[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise StepLogError(f"{place}: expected {kind.__name__}, found {type(value).__name__}")
    if isinstance(value, int) and value < 0:
        raise StepLogError(f"{place}: expected 0 or more, found {value}")
    return value
