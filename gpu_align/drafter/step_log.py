"""The step log of one request: its types, and how a file is written and read.

A step log says what happened in each verification step of one request. The vLLM plugin writes one YAML file a
request; `gpu-align report` and the demo read it. `docs/metrics.md` describes every field. Files need PyYAML. A
field stands once, in its class: the reader goes by name and annotation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from ..ops.errors import MissingExtraError
from ..ops.files import Domain, Natural, TokenId, checked, expect

#: The number changes where a reader of the old one could not read the new one.
FORMAT = "gpu-align-steps/1"
#: Counts the fields that were added, which a reader may ignore. 1 (no key in the file): all but lines. 2: lines.
REVISION = 2
#: Names of `gpu_align.Source`, in its order, and the model's own drafter of an engine that has one beside.
SOURCES = ("none", "prediction", "context", "recipe", "memory", "draft_model")

#: Tokens before a text that it is decoded with: leading spaces and torn characters depend on them.
_TEXT_CONTEXT = 8
_TORN = "\ufffd"  # what a decoder writes for a character of which a later token has the rest
#: Tokens of a line that is not complete which each step shows: the last ones. Without a limit the file of an
#: output that has no newlines would grow with the square of its length.
MAX_PREFIX = 128
#: What YAML takes for the end of a line.
_LINE_BREAKS = frozenset("\n\r\x85\u2028\u2029")

#: Token ids -> text.
Decode = Callable[[list[int]], str]
_SourceName = Annotated[str, Domain(f"one of {', '.join(SOURCES)}", SOURCES.__contains__)]


@dataclass(frozen=True)
class Line:
    """Tokens of one line: up to the one whose text has the newline. `text` is None where it is not known."""

    tokens: list[TokenId]
    text: str | None = None


@dataclass(frozen=True)
class Step:
    """One verification step; the fields of the file, in its order. None stands for what a file lacks."""

    step: Natural  # from 0
    position: Natural  # tokens before it, prompt and output
    source: _SourceName  # of what was proposed
    proposed: list[TokenId]
    confidence: list[float]
    duration_us: Natural
    verified: Natural  # by the engine: accepted <= verified <= len(proposed)
    accepted: Natural  # drafts that are in the output
    new: list[TokenId]  # the accepted drafts, then the model's own tokens
    cursor_before: Natural | None = None  # where the output stood in the prediction when the draft was made
    cursor_after: Natural | None = None  # and with the new tokens
    candidate: dict[str, Any] | None = None  # fields of `gpu_align.drafter.explain.Explained`
    others: Natural = 0  # candidates that were not chosen
    proposed_text: str | None = None
    accepted_text: str | None = None
    own_text: str | None = None
    new_lines: list[Line] | None = None  # those that the new tokens complete; None: no text to find lines in
    prefix: Line | None = None  # the line that is not complete after them, its last MAX_PREFIX tokens

    @property
    def rejected(self) -> int:
        return self.verified - self.accepted


@dataclass(frozen=True)
class StepLog:
    """One request."""

    request_id: str
    num_draft_tokens: Natural  # K
    prompt_tokens: Natural
    prediction_tokens: Natural
    steps: list[Step]
    prediction_lines: list[Line] | None = None  # one line where there is no text to find lines in

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
        """This log with the texts of its tokens, in lines. prompt: the tokens before the first step."""
        texts = Texts(decode, prompt)
        lines = self.prediction_lines
        if lines is not None:
            lines = texts.lines_of([token for line in lines for token in line.tokens])
        return replace(self, steps=[texts.of(step) for step in self.steps], prediction_lines=lines)


@cache
def _ends_line(decode: Decode, token: int) -> bool:
    return "\n" in decode([token])


class Texts:
    """Adds texts and lines to the steps of one request, in their order. prompt: the tokens before the first."""

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._before = list(prompt[-_TEXT_CONTEXT:])
        self._prefix = Line([], "")

    def lines_of(self, tokens: list[int]) -> list[Line]:
        """A text of its own, such as a prediction, in lines; the last one may lack its newline."""
        *lines, rest = self._lines([], Line([], ""), tokens)
        return [*lines, rest] if rest.tokens else lines

    def of(self, step: Step) -> Step:
        """`step` with its texts; the next call is for the next step."""
        decode, before = self._decode, self._before
        accepted, own = step.new[: step.accepted], step.new[step.accepted :]
        *lines, self._prefix = self._lines(before, self._prefix, step.new)
        prefix, cut = self._prefix, len(self._prefix.tokens) - MAX_PREFIX
        if cut > 0:
            shown = prefix.tokens[cut:]
            prefix = Line(shown, _text_after(decode, prefix.tokens[max(0, cut - _TEXT_CONTEXT) : cut], shown))
        self._before = (before + step.new)[-_TEXT_CONTEXT:]
        return replace(
            step,
            proposed_text=_text_after(decode, before, step.proposed),
            accepted_text=_text_after(decode, before, accepted),
            own_text=_text_after(decode, (before + accepted)[-_TEXT_CONTEXT:], own),
            new_lines=lines,
            prefix=prefix,
        )

    def _lines(self, before: list[int], prefix: Line, tokens: list[int]) -> list[Line]:
        """`prefix` and these tokens after it, in lines; the last one is not complete and may be empty. before: the
        tokens before `tokens`."""
        lines, begin, text, line = [], 0, prefix.text or "", prefix.tokens
        ends = [i + 1 for i, token in enumerate(tokens) if _ends_line(self._decode, token)]
        for end in [*ends, len(tokens)]:
            part = tokens[begin:end]
            text += _text_after(self._decode, before, part)
            lines.append(Line([*line, *part], text))
            before, begin, line, text = (before + part)[-_TEXT_CONTEXT:], end, [], ""
        return lines


def _text_after(decode: Decode, before: list[int], tokens: list[int]) -> str:
    """The text that `tokens` add to that of `before`; a character of several tokens is the last one's."""
    if not tokens:
        return ""
    known, whole = decode(before).rstrip(_TORN), decode(before + tokens).rstrip(_TORN)
    return whole[len(known) :]


def dump(log: StepLog) -> str:
    """The file of a request that has finished; a step without texts has no keys for them."""
    import yaml

    names = ("request_id", "num_draft_tokens", "prompt_tokens", "prediction_tokens")
    document = {"format": FORMAT, "revision": REVISION, **{name: getattr(log, name) for name in names}}
    document["usage"] = log.usage()
    if log.prediction_lines is not None:
        document["prediction_lines"] = list(map(_row, log.prediction_lines))
    document["steps"] = list(map(_row, log.steps))
    how: Any = {"sort_keys": False, "default_flow_style": None, "allow_unicode": True, "width": 100}
    return str(yaml.dump(document, Dumper=_dumper(), **how))


def _row(part: Step | Line) -> dict[str, Any]:
    """A row of the file: all fields but the texts and lines that are not known."""
    always = ("cursor_before", "cursor_after", "candidate")
    row = {name: value for name, value in vars(part).items() if value is not None or name in always}
    if "new_lines" in row:
        row["new_lines"] = list(map(_row, row["new_lines"]))
    if "prefix" in row:
        row["prefix"] = _row(row["prefix"])
    return row


@cache
def _dumper() -> Any:
    """Writes a text of several lines with escapes: it stands on one line."""
    import yaml

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
        pass

    def represent(dumper: Any, text: str) -> Any:
        style = None if _LINE_BREAKS.isdisjoint(text) else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent)
    return Dumper


class StepLogError(ValueError):
    """A file is not a whole step log; the message names the place and what was expected there."""


#: Levels that a step log may nest: libyaml composes by recursion, and thousands overrun its stack.
MAX_DEPTH = 50


def read_step_log(path: Path) -> StepLog:
    """Read a file that the plugin wrote. StepLogError: it is not YAML, or not a whole step log. MissingExtraError:
    PyYAML is not installed."""
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError("gpu-align report", "PyYAML", "cli") from error
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text, depth = path.read_bytes().decode(), 0
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise StepLogError(f"expected at most {MAX_DEPTH} levels of YAML, found more")
        document = checked(dict, yaml.load(text, Loader=loader))
        expect(document.get("format") == FORMAT, "format", repr(FORMAT), document.get("format"))
        log: StepLog = checked(StepLog, document)
        for i, step in enumerate(log.steps):
            counts = [step.accepted, step.verified, len(step.proposed)]
            is_right = sorted(counts) == counts and step.accepted <= len(step.new)
            expected = "accepted <= verified <= proposed tokens, accepted ones new"
            expect(is_right, f"steps[{i}]", expected, counts)
    except UnicodeDecodeError as error:
        raise StepLogError(f"expected UTF-8 text, found another byte at {error.start}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        problem = getattr(error, "problem", None) or "torn file"
        raise StepLogError(f"{place}expected YAML: {problem}") from None
    except ValueError as error:
        raise StepLogError(str(error)) from None
    return log
