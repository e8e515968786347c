"""Skeletons: text that an answer will hold, as the request itself says, without the values.

A call of a tool and JSON by a schema consist of names, keys and punctuation, which the request announces, and of
values, which it does not. A skeleton is the announced text in pieces; each ends where a value begins::

    of_schema({"properties": {"path": {"type": "string"}, "line": {"type": "integer"}}})
    # ['{"path": "', '", "line": ', "}"]

How a model writes a call only its chat template knows: `of_tools` is given a function that renders a conversation,
and compares it with and without a call. Names come in the order of the schema, which grammars demand. After a
value of an enumeration the text is known again: each such value has a piece of its own, with the text around it.

A drafter takes the pieces as one text: `join` puts a gap between them, over which no draft and no match reaches.
Besides, strings go in and strings come out, without a tokenizer. A request without a skeleton raises
`SkeletonError`, which says why.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import takewhile
from time import thread_time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..ops.layout import FIRST_GAP, TextKind

#: Renders messages, and whether the next turn is the assistant's, as a prompt.
Render = Callable[[list[dict[str, Any]], bool], str]
#: Names and values of one tool or schema; how deep they nest; texts of one value that have pieces; tools.
MAX_MARKS, MAX_DEPTH, MAX_WORDS, MAX_TOOLS = 128, 8, 8, 256
#: Shapes of tools whose calls are kept as text, a kilobyte or so each.
MAX_FRAMES = 1024
Style = tuple[str, str, int | None]
#: Separators and indent of JSON: as `json.dumps` and most models write it, compact, and on lines.
STYLES = SPACED, COMPACT, LINES = (", ", ": ", None), (",", ":", None), (",", ": ", 2)
#: In place of a string, a number and another value: nine characters, as in a call's id of Mistral's templates.
_STRING, _NUMBER, _OTHER = "zq{:05}qz", "98{:05}89", "97{:05}79"
_MARK = re.compile(r"(zq|98|97)([0-9]{5})(?:qz|89|79)")
#: By the type of a value. One of no type is taken for a string: most are.
_FORMS = {"string": _STRING, "integer": _NUMBER, "number": _NUMBER}
#: Characters before a word that its piece begins with, so that it matches longer than the word alone.
_HEAD = 16
#: The mark of a tool's name.
_NAME = 1
#: What every template writes as it is.
_PLAIN = re.compile(r"[\w.$:/@+ -]{1,256}", re.ASCII)
#: Between the words of a name.
_BETWEEN = re.compile(r"[\W_]", re.ASCII)
#: Keys of a schema under which others stand in its place.
_GROUPS = ("anyOf", "oneOf", "allOf")
REASONS = ("names", "size", "template", "time")


class SkeletonError(ValueError):
    """A request has no skeleton. reason: one of `REASONS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Document:
    """A document by a JSON schema with a mark in place of each name and value.

    root: what `$ref` refers to. words: of each mark the texts that it may stand for, and an empty one if there are
    others; none where nothing is known.
    """

    def __init__(self, root: Any, truth: tuple[str, ...] = ("true", "false")) -> None:
        self._root, self._truth = root, truth
        self.words: list[tuple[str, ...]] = []

    def mark(self, kind: str, words: tuple[str, ...] = ()) -> Any:
        number = len(self.words)
        if number == MAX_MARKS:
            raise SkeletonError("size")
        self.words.append(words)
        text = kind.format(number)
        return text if kind is _STRING else int(text)

    def name(self, name: str) -> Any:
        if not _PLAIN.fullmatch(name):
            raise SkeletonError("names")
        return self.mark(_STRING, (name,))

    def of(self, schema: Any, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise SkeletonError("size")
        schema = schema if isinstance(schema, dict) else {}
        if isinstance(name := schema.get("$ref"), str):
            return self.of(self._target(name), depth + 1)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            return self._one_of(values)
        for group in _GROUPS if "properties" not in schema else ():
            if isinstance(choices := schema.get(group), list):
                found = (each for each in choices if isinstance(each, dict) and each.get("type") != "null")
                return self.of(next(found, None), depth + 1)
        kind = schema.get("type", "object" if "properties" in schema else None)
        if isinstance(kind, list):
            kind = next((each for each in kind if each != "null"), None)
        if kind == "object" and isinstance(properties := schema.get("properties"), dict):
            return {self.name(name): self.of(inner, depth + 1) for name, inner in properties.items()}
        if kind == "array" and "items" in schema:
            return [self.of(schema["items"], depth + 1) for _ in range(2)]
        form = _FORMS.get(kind, _OTHER) if isinstance(kind, str) else _STRING
        return self.mark(form, self._truth if kind == "boolean" else ())

    def _one_of(self, values: list[Any]) -> Any:
        first = values[:MAX_WORDS]
        kind = _STRING if all(isinstance(value, str) for value in first) else _OTHER
        plain = (value for value in first if not isinstance(value, (dict, list)))
        texts = (value if kind is _STRING else json.dumps(value) for value in plain)
        words = [word for word in texts if _PLAIN.fullmatch(word)]
        return self.mark(kind, (*words, *[""] * (len(words) < len(values))) if words else ())

    def _target(self, name: str) -> Any:
        """The schema that a reference names; None for one elsewhere."""
        target = self._root if name.startswith("#") else None
        for step in name.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            target = target.get(step) if isinstance(target, dict) else None
        return target


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How much both have in common at the beginning: characters of two texts, tokens of two encodings."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class _Frame(NamedTuple):
    """A text with marks. begin: before them. marks: of each whether it is a number's, which, and what follows."""

    begin: str
    marks: list[tuple[bool, int, str]]

    @classmethod
    def of(cls, text: str) -> _Frame:
        begin, *rest = _MARK.split(text)
        marks = zip(rest[::3], rest[1::3], rest[2::3], strict=True)
        return cls(begin, [(_NUMBER.startswith(kind), int(mark), after) for kind, mark, after in marks])

    def pieces(self, words: Sequence[tuple[str, ...]], cut: int | None = None) -> list[str]:
        """After a value of few words one piece for each of them. words: as of `_Document`. cut: a mark after whose
        only word a piece ends; the next one begins with that word.

        A blank before a value belongs to the value's token, but for a number's.
        """
        found, text, before = list[str](), self.begin, [""]
        for is_number, mark, after in self.marks:
            known = words[mark]
            if len(known) == 1:
                if mark == cut:
                    found.append(text + known[0])
                    text = ""
                text += known[0] + after
                continue
            end = text if is_number else text.rstrip(" ") or text
            found += [word + end for word in before]
            head, text = text[-_HEAD:], after
            before = [word and head + word for word in known] or [""]
        return [*filter(None, found), *filter(None, (word + text for word in before))]


def join(
    pieces: Sequence[str], encode: Callable[[list[str]], list[list[int]]], forced: bool = False
) -> list[int]:
    """Token ids of pieces as a text to draft from: a gap before, between and after them, each of its own id.

    encode: texts → the token ids of each. A blank before a number stays where it is a token before any digit.
    forced: the answer has to begin with the first piece, so no gap is before it.
    """
    if len(pieces) >= 2**31 - FIRST_GAP:
        raise SkeletonError("size")
    with_digit = [piece + "1" if piece.endswith(" ") else piece for piece in pieces]
    others = iter(encode([piece + "7" for piece in pieces if piece.endswith(" ")]))
    found = [FIRST_GAP]
    for gap, (piece, ids) in enumerate(zip(pieces, encode(with_digit), strict=True), FIRST_GAP + 1):
        found += ids[: _common(ids, next(others))] if piece.endswith(" ") else ids
        found.append(gap)
    return found[forced:]


def kind_of(tokens: npt.ArrayLike) -> TextKind:
    """The kind of a text that holds skeletons: `SKELETON` if at least one of 16 tokens is a gap, else
    `RELATED_MEMORY`."""
    is_gap = np.asarray(tokens) >= FIRST_GAP
    return TextKind.SKELETON if 16 * is_gap.sum() >= is_gap.size else TextKind.RELATED_MEMORY


def of_schema(schema: Any, style: Style = SPACED) -> list[str]:
    """The pieces of JSON by a schema. style: `SPACED`, `COMPACT` or `LINES`. Raises `SkeletonError`."""
    document = _Document(schema)
    comma, colon, indent = style
    made = document.of(schema)
    text = json.dumps(made, ensure_ascii=False, separators=(comma, colon), indent=indent)
    return _Frame.of(text).pieces(document.words)


class Calls:
    """How the calls of one chat template read; it remembers the shapes that it has rendered.

    Raises `SkeletonError` if the template raises, or renders no calls.
    """

    #: A message's content, and whether arguments are JSON's text, as templates want them.
    _STYLES = (("", False), (None, False), ("", True))

    def __init__(self, render: Render) -> None:
        self._render = render
        self._frame = lru_cache(MAX_FRAMES)(self._make_frame)
        self._asked: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
        marks = _Document({})
        self._id, name, key, value = (marks.mark(_STRING) for _ in range(4))
        for style in self._STYLES:
            self._style = style
            try:
                self._start = render(self._asked, True)
                text, true = (self.text(name, {key: each}) for each in (value, True))
            except Exception:  # of the template, whatever it is
                continue
            if name in text and key in text and value in text:
                # The words may also stand elsewhere in what the template writes.
                is_json = true.count("true") > text.count("true")
                self._truth = ("true", "false") if is_json else ("True", "False")
                self._head = text[: text.index(name)]
                return
        raise SkeletonError("template")

    def text(self, name: str, arguments: dict[str, Any]) -> str:
        """A call as an answer has it."""
        content, as_text = self._style
        function = {"name": name, "arguments": json.dumps(arguments) if as_text else arguments}
        call = {"id": self._id, "type": "function", "function": function}
        answer = {"role": "assistant", "content": content, "tool_calls": [call]}
        whole = self._render([*self._asked, answer], False)
        return whole[_common(self._start, whole) :].rstrip()

    def _make_frame(self, name: str, shape: str, tenant: str) -> _Frame:
        """`text` of arguments that are marks, which a tenant's tools of one shape share. shape: the arguments, as
        JSON."""
        try:
            return _Frame.of(self.text(name, json.loads(shape)))
        except Exception:  # of the template, whatever it is
            raise SkeletonError("template") from None

    def of_tools(self, tools: Sequence[Any], deadline: float = float("inf"), tenant: str = "") -> list[str]:
        """The pieces of calls of these tools; a piece up to the name comes first where there are several.

        tools: as in a request. deadline: of `time.thread_time`. tenant: whose shapes save time. Raises
        `SkeletonError`.
        """
        if len(tools) > MAX_TOOLS:
            raise SkeletonError("size")
        found, named = list[str](), [*_functions(tools)]
        first_words = [_BETWEEN.split(name, 1)[0] for name, _ in named]
        num_alike = Counter(first_words)
        for (name, schema), word in zip(named, first_words, strict=True):
            if thread_time() > deadline:
                raise SkeletonError("time")
            document = _Document(schema, self._truth)
            document.mark(_STRING)  # the call's id
            called, made = document.name(name), document.of(schema)
            frame = self._frame(called, json.dumps(made if isinstance(made, dict) else {}), tenant)
            # Of names that begin alike, only one is right: no more than the name is drafted.
            found += frame.pieces(document.words, _NAME if num_alike[word] > 1 else None)
        return [self._head, *found] if len(tools) > 1 and self._head else found


def announces(request: dict[str, Any]) -> bool:
    """Whether a request has tools, or a schema that its answer has to follow."""
    return bool(request.get("tools")) or next(_schemas_of(request), None) is not None


def of_request(
    request: dict[str, Any],
    calls: Callable[[], Calls | None],
    styles: Iterable[Style] = STYLES,
    seconds: float = float("inf"),
) -> list[str]:
    """The pieces of everything that a request of OpenAI's or Anthropic's APIs announces. Raises `SkeletonError`.

    calls: those of its model, asked for if there are tools; None: nothing says how they read. seconds: of this
    thread, after which no further tool is read, and after a quarter of it no schema.
    """
    tools, choice = request.get("tools") or [], request.get("tool_choice")
    if not isinstance(tools, list):
        raise SkeletonError("names")
    found, deadline = list[str](), thread_time() + seconds / 4
    for schema in _schemas_of(request):
        if thread_time() > deadline:
            raise SkeletonError("time")
        found += [piece for style in styles for piece in of_schema(schema, style)]
    if tools and "none" not in (choice, choice.get("type") if isinstance(choice, dict) else None):
        if (known := calls()) is None:  # the first time, this compiles a template
            raise SkeletonError("template")
        found += known.of_tools(tools, thread_time() + seconds, str(request.get("cache_salt")))
    return found


def style_of(text: Any) -> Style | None:
    """The style of an answer in JSON; None for another text, or for JSON without a name and what follows it."""
    if not isinstance(text, str) or text[:1] not in ("{", "[") or '":' not in text[:-1]:
        return None
    return LINES if "\n" in text else SPACED if '": ' in text else COMPACT


def styles_of(request: dict[str, Any], likely: Style = SPACED) -> tuple[Style, ...]:
    """The style of the conversation's last answer in JSON. Without such an answer every style, the likely one
    first: drafts begin in the first."""
    messages = request.get("messages")
    for message in reversed(messages if isinstance(messages, list) else []):
        is_answer = isinstance(message, dict) and message.get("role") == "assistant"
        if is_answer and (found := style_of(message.get("content"))):
            return (found,)
    return (likely, *(style for style in STYLES if style != likely))


def _schemas_of(request: dict[str, Any]) -> Iterator[Any]:
    """The JSON schemas that the answer has to follow: a format's, or those of tools that have to be called."""
    given, holders = request.get("structured_outputs"), (request.get("text"), request.get("output_config"))
    formats = [each.get("format") for each in holders if isinstance(each, dict)]
    for asked in (request.get("response_format"), *formats):
        if isinstance(asked, dict) and asked.get("type") == "json_schema":
            inner = asked.get("json_schema", asked)
            if isinstance(inner, dict) and isinstance(inner.get("schema"), dict):
                yield inner["schema"]
    if isinstance(given, dict) and given.get("json") is not None:
        with contextlib.suppress(ValueError):  # no JSON: the server refuses it
            yield json.loads(given["json"]) if isinstance(given["json"], str) else given["json"]
    tools, choice = request.get("tools"), request.get("tool_choice")
    chosen: Any = choice.get("function", choice) if isinstance(choice, dict) else {}
    named = chosen.get("name") if isinstance(chosen, dict) else None
    is_any = choice == "required" or (isinstance(choice, dict) and choice.get("type") == "any")
    for name, schema in _functions(tools) if named is not None or is_any else ():
        if is_any:
            call = {"properties": {"name": {"const": name}, "parameters": schema}}
            shared = schema if isinstance(schema, dict) else {}
            definitions = {key: shared.get(key) for key in ("$defs", "definitions")}
            yield {"type": "array", "items": call, **definitions}
        elif name == named:
            yield schema


def _functions(tools: Any) -> Iterator[tuple[str, Any]]:
    """Name and schema of each tool, whichever API's it is."""
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            yield name, function.get("parameters", function.get("input_schema"))
