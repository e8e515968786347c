"""Views of a text: in a form in which a model may write it, or out of the form in which the model read it.

A model that answers in JSON writes a file's line ends as ``\\n`` and its quotes as ``\\"``: other tokens than the
file's own. A drafter that is given the escaped text as well drafts it whole.

::

    make('a = "b"\\n', ["json"])                        # ['a = \\\\"b\\\\"\\\\n']
    make("1:import os\\n2:\\n3:os.abort()\\n", ["unnumbered"])   # ['import os\\n\\nos.abort()\\n']

Strings in, strings out, without a tokenizer. All views take time in proportion to the text.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Sequence

#: Views that an answer may hold, the likeliest first, where it may be JSON (a patch stands in a string then) and
#: where it is not.
FORMS_OF_JSON, FORMS_OF_TEXT = ("json", "diff+json", "diff_minus+json"), ("diff", "diff_minus")
#: Both, where nothing tells.
FORMS = (*FORMS_OF_JSON, *FORMS_OF_TEXT)
#: Fewer numbered lines in a row are no listing.
MIN_LISTED = 3
#: A line's number, what ends it and the rest: ``cat -n`` (a tab), ``12:``, ``12|``, ``12→``, with blanks on both
#: sides. ``12:34:`` is a time. A pattern that begins with a line end is searched for at line ends only.
_NUMBERED = re.compile(r"\n {0,12}([0-9]{1,9}) {0,8}([:|→](?![0-9][0-9]:)|(?<! )\t)(.*)")
_FENCE = re.compile(r"\n {0,3}(`{3,}(?=[^`\n]*$)|~{3,})(.*)", re.MULTILINE)
#: Tags between which prompts show files; those of HTML and of code are left alone.
_TAG = re.compile(r"<(/?)(code|file|document|tool_response|(?:file_|document_)?contents?)(?: [^<>\n]*)?>\n?")


def make(text: str, names: Iterable[str]) -> list[str]:
    """The views of a text by their names, in this order, each once, without empty ones and the text itself.

    names: of `NAMES`, or two joined by ``+``, the second a view of the first: ``unnumbered+json``. ValueError: a
    name is not known; the message lists those that are.
    """
    names = tuple(names)
    check_names("views", names)
    made = {text: "", "": ""}
    for name in names:
        view = text
        for step in name.split("+"):
            view = _VIEWS[step](view)
        made.setdefault(view, name)
    return [view for view, name in made.items() if name]


def check_names(where: str, names: Iterable[object]) -> None:
    """Raise ValueError, which does not repeat the name, unless `make` knows each of these."""
    for index, name in enumerate(names):
        steps = name.split("+") if isinstance(name, str) else []
        if not 1 <= len(steps) <= 2 or not set(steps) <= set(NAMES):  # each step may double a text
            raise ValueError(f"{where}[{index}]: expected one of {', '.join(NAMES)}, found another name")


def in_forms(texts: Iterable[str], forms: Sequence[str] = FORMS) -> list[str]:
    """The texts to draft from, the most important first: each text and its first form, then its other forms."""
    texts = list(texts)
    first = [view for text in texts for view in (text, *make(text, forms[:1])) if view]
    return list(dict.fromkeys(first + [view for text in texts for view in make(text, forms[1:])]))


def of_message(message: str, may_be_json: bool, is_result: bool = False) -> list[str]:
    """The texts to draft from where an answer may repeat parts of this message, the most important first.

    may_be_json: whether the answer may hold them as strings of JSON, which come first then. is_result: of a tool,
    which may be a file as a whole. What people and the model write is not: thoughts repeat a few words of it.
    """
    texts = [text for text in texts_in(message, is_result and may_be_json) if "\n" in text]
    found = in_forms(texts, FORMS_OF_JSON if may_be_json else FORMS_OF_TEXT)
    return [text for text in found if text not in texts] + texts if may_be_json else found


def texts_in(message: str, whole: bool = False) -> list[str]:
    """The texts in a message that the answer may repeat: listings, the insides of fences and tags, JSON strings.

    whole: the message may be such a text itself, as a tool's result is; it is where they are less than half of it.
    """
    found = make(message, ["unnumbered"])
    for text in make(message, ["unfenced", "untagged", "unescaped"]):
        found += make(text, ["unnumbered"]) or [text]
    if whole and 2 * sum(map(len, found)) < len(message):
        found.insert(0, message)
    return list(dict.fromkeys(found))


def _json(text: str) -> str:
    """As the inside of a JSON string. Inverse: ``json.loads('"' + view + '"')``."""
    quoted = json.dumps(text, ensure_ascii=text.isascii())  # for ASCII, json's other encoder is twice as fast
    return quoted[1:-1]


def _diff(text: str, mark: str = " ") -> str:
    """As lines of a unified diff, this mark before each. Inverse: each line without its first character."""
    body = text.removesuffix("\n")
    return mark + body.replace("\n", f"\n{mark}") + text[len(body) :] if text else ""


def _unnumbered(text: str) -> str:
    """The numbered listings of a text, without the numbers and without the lines around them.

    A listing has `MIN_LISTED` lines or more whose numbers go up by one and are ended alike; each ends in
    a line feed. A blank after the number belongs to it where the least indented line would be indented by an odd
    number of blanks otherwise.
    """
    listings: list[list[str]] = []  # the lines after their numbers; all that follows a tab is the line's
    expected: tuple[int, int, str] | None = None  # where the next line begins, its number and what ends it
    for match in _NUMBERED.finditer("\n" + text):
        digits, ending, line = match.groups()
        if (match.start(), int(digits), ending) != expected:
            listings.append([])
        listings[-1].append(line)
        expected = match.end(), int(digits) + 1, ending
    listings = [_without_margin(lines) for lines in listings if len(lines) >= MIN_LISTED]
    return "".join(line + "\n" for lines in listings for line in lines)


def _without_margin(lines: list[str]) -> list[str]:
    if not all(line[:1] in " \r" for line in lines):
        return lines
    indents = [len(line) - len(line.lstrip(" ")) for line in lines if line.strip()]
    return [line.removeprefix(" ") for line in lines] if min(indents, default=0) % 2 else lines


def _unfenced(text: str) -> str:
    """The texts inside the fences (three or more backticks or tildes) of a text; the last may be left open."""
    parts, opened, start, text = [], "", 0, "\n" + text
    for match in _FENCE.finditer(text):
        fence, rest = match[1], match[2].strip()
        if not opened:
            opened, start = fence, match.end() + 1
        elif fence.startswith(opened) and not rest:
            parts.append(text[start : match.start() + 1])
            opened = ""
    return "".join(parts) + (text[start:] if opened else "")


def _untagged(text: str) -> str:
    """The texts between tags of files, the innermost, if they have a line end."""
    parts, opened, start = [], "", 0
    for match in _TAG.finditer(text):
        closes, name = match.groups()
        if not closes:
            opened, start = name, match.end()
        elif name == opened and "\n" in (part := text[start : match.start()]):
            parts.append(part)
        opened = "" if closes else opened
    return "".join(parts)


def _unescaped(text: str) -> str:
    """The strings in a JSON text that hold line ends (``\\n``), decoded; others and broken ones are left out."""
    parts: list[str] = []
    for line in text.split("\n") if "\\n" in text else ():
        start = 0
        # Without escapes, quotes are where strings begin and end; the last piece is in no string.
        for number, piece in enumerate(line.replace("\\\\", "  ").replace('\\"', "  ").split('"')[:-1]):
            if number % 2 and "\\n" in piece:
                with contextlib.suppress(ValueError):
                    parts.append(json.loads(line[start - 1 : start + len(piece) + 1]))
            start += len(piece) + 1
    return "".join(parts)


_VIEWS: dict[str, Callable[[str], str]] = {
    "json": _json,
    "json_ascii": lambda text: json.dumps(text)[1:-1],  # with \\u for all that is not ASCII
    "json_slash": lambda text: _json(text).replace("/", "\\/"),
    "json_twice": lambda text: _json(_json(text)),  # a JSON string inside a JSON string
    "diff": _diff,  # lines that are kept
    "diff_minus": lambda text: _diff(text, "-"),  # lines that are removed
    "unnumbered": _unnumbered,
    "unfenced": _unfenced,
    "untagged": _untagged,
    "unescaped": _unescaped,
}
#: The views that `make` knows.
NAMES = tuple(_VIEWS)
