"""How the API reference reads this project's sources: three habits that Griffe does not know by itself.

- A comment ``#:`` above an attribute is its documentation.
- ``a, b: text`` documents both parameters, and a paragraph under ``Args:`` that names none is a remark.
- A paragraph with indented lines is code, whether ``::`` announces it or not; Markdown wants it fenced.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import griffe

_SECTION = re.compile(r"(Args|Attributes|Example|Examples|Note|Raises|Returns|Source):")
_GROUP = re.compile(r"^    (\w+(?:, \w+)+): (.*)$", re.MULTILINE)
_FIELD = re.compile(r"    \w+(?:, \w+)*: ")
_LIST_ITEM = re.compile(r"([-*]|\d+\.) ")


class ProjectDocstrings(griffe.Extension):
    """Fills in `#:` comments and fences literal blocks, before anything is rendered."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and attr.lineno is not None and isinstance(attr.filepath, Path):
            comment = comment_above(attr.filepath.read_text(encoding="utf-8").splitlines(), attr.lineno)
            if comment:
                attr.docstring = griffe.Docstring(comment, parent=attr, lineno=attr.lineno)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fence_literals(ungroup(obj.docstring.value))


def comment_above(lines: list[str], lineno: int) -> str:
    """The ``#:`` lines right above line `lineno` (from 1), joined; "" if there are none."""
    first = lineno - 1
    while first > 0 and lines[first - 1].lstrip().startswith("#:"):
        first -= 1
    return "\n".join(line.lstrip()[2:].strip() for line in lines[first : lineno - 1])


def ungroup(docstring: str) -> str:
    """Give each parameter of ``a, b: text`` its own line, and move remarks out of ``Args:``."""
    docstring = _GROUP.sub(lambda m: "\n".join(f"    {name}: {m[2]}" for name in m[1].split(", ")), docstring)
    paragraphs, in_args = [], False
    for paragraph in docstring.split("\n\n"):
        in_args = paragraph.startswith("Args:") or (in_args and paragraph.startswith("    "))
        if in_args and not paragraph.startswith("Args:") and not _FIELD.match(paragraph):
            paragraph = "\n".join(line.strip() for line in paragraph.split("\n"))
        paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)


def fence_literals(docstring: str) -> str:
    """Put a fence around each literal block, and drop the ``::`` before it.

    >>> print(fence_literals("As a loop::\\n\\n    for i in x:\\n        f(i)"))
    As a loop:
    <BLANKLINE>
    ```python
    for i in x:
        f(i)
    ```
    """
    paragraphs = docstring.split("\n\n")
    parts: list[str] = []
    in_section = False
    i = 0
    while i < len(paragraphs):
        paragraph = paragraphs[i]
        i += 1
        # A section ends at the next paragraph that starts at the margin.
        in_section = bool(_SECTION.match(paragraph)) or (in_section and paragraph.startswith("    "))
        if in_section:
            parts.append(paragraph)
        elif paragraph.rstrip().endswith("::"):
            parts.append(paragraph.rstrip()[:-1])
            code = []
            while i < len(paragraphs) and paragraphs[i].startswith("    "):
                code.append(paragraphs[i])
                i += 1
            parts.append(_fenced("\n\n".join(code)))
        elif _looks_like_code(paragraph):
            parts.append(_fenced(paragraph))
        else:
            parts.append(paragraph)
    return "\n\n".join(part for part in parts if part not in ("", ":"))


def _looks_like_code(paragraph: str) -> bool:
    """Prose is never indented here, but for the lines of a list."""
    first, *rest = paragraph.split("\n")
    return (
        not first.startswith(" ")
        and not _LIST_ITEM.match(first)
        and any(line.startswith("    ") for line in rest)
    )


def _fenced(code: str) -> str:
    return f"```python\n{textwrap.dedent(code).strip()}\n```" if code else ""
