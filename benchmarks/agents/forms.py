"""One edit in the forms in which agents read files and write changes."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.agents.readers import Change, Edit, Message

#: Lines before and after a change that an answer repeats.
CONTEXT = 3


class Exchange(NamedTuple):
    """What one request holds, and the answer to it."""

    messages: tuple[Message, ...]
    answer: str
    tools: bool  # whether the answer is a tool call's JSON, or stands before one
    task: str


def numbered(text: str) -> str:
    """As ``cat -n`` prints it."""
    return "".join(f"{number:6}\t{line}\n" for number, line in enumerate(text.splitlines(), 1))


#: How a file is read: its path and text → the message that shows it.
READ: dict[str, Callable[[str, str], str]] = {
    "raw": lambda path, text: f"{path}\n```\n{text}```",
    "numbered": lambda path, text: f"Here's the result of running `cat -n` on {path}:\n{numbered(text)}",
    "JSON": lambda path, text: _json({"path": path, "content": text}),
}


def as_written(edit: Edit) -> str:
    """The model's own answer."""
    return edit.written


def thoughts(edit: Edit) -> str:
    """What the model wrote before what it did, where it did something."""
    said = edit.said.partition("```")[0].strip()
    return said if edit.written and said != edit.written.strip() else ""


def lines_call(edit: Edit) -> str:
    """SWE-agent's edit by line numbers as a tool call."""
    if edit.call is None:
        return ""
    first, last, new = edit.call
    return _call("edit", start_line=first, end_line=last, replacement_text=new)


def whole(edit: Edit) -> str:
    """The new file in a fence."""
    return f"```\n{edit.changes[0].after}```" if edit.file else ""


def whole_call(edit: Edit) -> str:
    """The new file in a tool call."""
    if not edit.file:
        return ""
    return _call("write_file", path=edit.changes[0].path, content=edit.changes[0].after)


def replace_call(edit: Edit) -> str:
    """Old and new text of each hunk in tool calls."""
    calls = (
        _call("str_replace", path=change.path, old_str=old, new_str=new)
        for change in edit.changes
        for _, old, new in hunks(change)
    )
    return "\n".join(calls)


def search_replace(edit: Edit) -> str:
    """Aider's blocks."""
    blocks = (
        f"{change.path}\n```\n<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n```"
        for change in edit.changes
        for _, old, new in hunks(change)
    )
    return "\n\n".join(blocks)


def apply_patch(edit: Edit) -> str:
    """Codex's patch."""
    files = (
        f"*** Update File: {change.path}\n" + "".join(f"@@\n{body}" for body, _, _ in hunks(change))
        for change in edit.changes
        if change.before != change.after
    )
    body = "".join(files)
    return f"*** Begin Patch\n{body}*** End Patch" if body else ""


def apply_patch_call(edit: Edit) -> str:
    """The same in a tool call."""
    patch = apply_patch(edit)
    return _call("apply_patch", input=patch) if patch else ""


def unified_diff(edit: Edit) -> str:
    """As Git prints it."""
    lines = (line for change in edit.changes for line in _diff(change))
    return "".join(lines)


#: How a change is written: answer → "" where the edit has no such form.
WRITE: dict[str, Callable[[Edit], str]] = {
    "as written": as_written,
    "thoughts": thoughts,
    "edit by lines, tool call": lines_call,
    "edit by lines, only the call": lines_call,
    "whole file": whole,
    "whole file, tool call": whole_call,
    "old and new text, tool call": replace_call,
    "SEARCH/REPLACE": search_replace,
    "apply_patch": apply_patch,
    "apply_patch, tool call": apply_patch_call,
    "unified diff": unified_diff,
}
#: Of these, what the model wrote itself.
_OWN = ("as written", "thoughts")
#: What is more than text, or stands before it.
_OF_TOOLS = ("tool call", "only the call", "thoughts")
#: Of a collection without a file of its own: as the conversation showed it.
AS_SHOWN = "as shown"


def exchanges(edit: Edit) -> dict[tuple[str, str], Exchange]:
    """How the file was read, how the change is written → the request with its answer; all that the edit has."""
    if edit.file:
        path = edit.changes[0].path
        shown = {
            read: (*edit.shown, Message(show(path, edit.file), is_result=True)) for read, show in READ.items()
        }
    else:
        shown = {AS_SHOWN: edit.shown}
    found = {}
    for name, write in WRITE.items():
        if answer := write(edit) if edit.changes or edit.call or name in _OWN else "":
            alone = name in _OWN or name.endswith("only the call") or not edit.said.strip()
            said = "" if alone else f"{edit.said}\n\n"
            for read, messages in shown.items():
                found[read, name] = Exchange(messages, said + answer, name.endswith(_OF_TOOLS), edit.name)
    return found


def hunks(change: Change) -> list[tuple[str, str, str]]:
    """Of each hunk its lines as in a diff, the old text, and the new."""
    found: list[list[str]] = []
    for line in _diff(change)[2:]:
        if line.startswith("@@"):
            found.append([])
        else:
            found[-1].append(line)
    sides = (
        ("".join(line[1:] for line in hunk if line[0] in kept) for kept in (" -", " +")) for hunk in found
    )
    return [("".join(hunk), *side) for hunk, side in zip(found, sides, strict=True)]  # type: ignore[misc]


def _diff(change: Change) -> list[str]:
    before, after = (text.splitlines(keepends=True) for text in change[1:])
    return list(difflib.unified_diff(before, after, f"a/{change.path}", f"b/{change.path}", n=CONTEXT))


def _call(name: str, **arguments: Any) -> str:
    return _json({"name": name, "arguments": arguments})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
