"""Edits out of public collections that a user has cloned: what the model was shown, what it wrote, and the same
change in the forms in which agents read files and write.

A folder may be a checkout or any part of one; files are told by their names. Nothing of a collection is kept here.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.corpus.files import hash_of

HALVES = ("seen", "held-out")
#: Lines before and after a change that an answer repeats.
CONTEXT = 3


class Change(NamedTuple):
    """A stretch of a file, as the model saw it and as it is to be; both end in a line feed, or are empty."""

    path: str
    before: str
    after: str


class Message(NamedTuple):
    """Of a conversation, before the answer."""

    text: str
    is_result: bool = False  # of a tool


class Edit(NamedTuple):
    """One answer of a model that edits, or of a person in its place."""

    collection: str
    name: str  # of the task; those of one name are in one half
    shown: tuple[Message, ...]  # the messages before the answer, oldest first, the model's own too
    said: str  # what it wrote before the change
    written: str  # its whole answer, as it wrote it; empty where a person wrote the file
    changes: tuple[Change, ...]  # none: the answer edits nothing
    file: str = ""  # the whole file before, where there is one; it is in no message of `shown`
    call: tuple[int, int, str] | None = None  # first and last line, and what replaces them

    @property
    def half(self) -> str:
        return HALVES[hash_of("agents", self.name) % 2]


#: SWE-agent shows so many observations whole, and only the number of lines of those before.
LAST_OBSERVATIONS = 5
_LISTING = re.compile(r"^\[File: (?P<path>\S+) \(\d+ lines total\)\]\n", re.MULTILINE)
_NUMBERED = re.compile(r"^(\d+):(.*)$")
_EDIT = re.compile(r"^edit (\d+):(\d+)\n(.*?)^end_of_edit$", re.MULTILINE | re.DOTALL)


def trajectories(folder: Path) -> Iterator[Edit]:
    """SWE-agent's ``TASK.traj``: edits by line numbers of files that were shown with them, and other answers."""
    for path in sorted(folder.rglob("*.traj")):
        collection = "Multi-SWE-bench" if path.parent.name == "trajs" else "SWE-agent"
        shown: list[str] = []
        observed: list[int] = []  # which of them are observations: all after the model's first answer
        answered: set[str] = set()
        for message in _json(path)["history"]:
            text = message.get("content") or ""
            if message["role"] != "assistant":
                observed += [len(shown)] if answered else []
            elif text not in answered:  # some repeat themselves to the end
                answered.add(text)
                yield _answer(collection, path.stem, _as_shown(shown, observed), text)
            shown.append(text)


def _as_shown(shown: list[str], observed: list[int]) -> tuple[Message, ...]:
    old = observed[:-LAST_OBSERVATIONS]
    lines = {at: f"Old output omitted ({shown[at].count(chr(10)) + 1} lines)" for at in old}
    return tuple(Message(lines.get(at, text), at in observed) for at, text in enumerate(shown))


def _answer(collection: str, name: str, shown: tuple[Message, ...], text: str) -> Edit:
    if (found := _EDIT.search(text)) is None:
        return Edit(collection, name, shown, text, text, ())
    first, last, new = int(found[1]), int(found[2]), found[3]
    said = text[: found.start()].rstrip("` \n")
    path, lines = _last_listing(shown)
    changes: tuple[Change, ...] = ()
    if all(number in lines for number in range(first, last + 1)):
        old = [f"{line}\n" for line in lines.values()]
        start, end = (list(lines).index(number) for number in (first, last))
        changes = (Change(path.lstrip("/"), "".join(old), "".join([*old[:start], new, *old[end + 1 :]])),)
    return Edit(collection, name, shown, said, text, changes, call=(first, last, new))


def _last_listing(shown: tuple[Message, ...]) -> tuple[str, dict[int, str]]:
    """The path and the numbered lines of the file that was shown last."""
    for text, _ in reversed(shown):
        if headers := list(_LISTING.finditer(text)):
            body = text[headers[-1].end() :].split("\n")
            found = filter(None, map(_NUMBERED.match, body))
            return headers[-1]["path"], {int(line[1]): line[2] for line in found}
    return "", {}


_PATCH = re.compile(
    r"<file>(.*?)</file>\s*<original>\n?(.*?)\n?</original>\s*<patched>\n?(.*?)\n?</patched>", re.DOTALL
)


def patches(folder: Path) -> Iterator[Edit]:
    """AutoCodeRover's ``TASK_DATE/debug_agent_write_patch_1.json``: old and new code between tags."""
    for path in sorted(folder.rglob("debug_agent_write_patch_1.json")):
        shown: list[str] = []
        for message in _json(path):
            text = message.get("content") or ""
            if message["role"] == "assistant" and (found := _PATCH.findall(text)):
                changes = tuple(Change(name, f"{old}\n", f"{new}\n") for name, old, new in found)
                said = text[: text.index("<file>")].rpartition("# modification")[0]
                name = re.split(r"_\d{4}-", path.parent.name)[0]
                yield Edit("AutoCodeRover", name, tuple(map(Message, shown)), said, text, changes)
                break
            shown.append(text)


_BLOCK = re.compile(
    r"^(\S+)\n```.*\n<{5,9} SEARCH\n(.*?)^={5,9}\n(.*?)^>{5,9} REPLACE\n```", re.MULTILINE | re.DOTALL
)
_CHAT = re.compile(r"^# aider chat started at .*\n", re.MULTILINE)
_TOLD = re.compile(r"(?:#### |> )(.*)")


def transcripts(folder: Path) -> Iterator[Edit]:
    """Aider's ``predictions/RUN/TASK.md``: SEARCH/REPLACE blocks. The files that they edit are not in it."""
    for path in sorted(folder.rglob("predictions/*/*__*.md")):
        for chat in _CHAT.split(path.read_text(encoding="utf-8")):
            parts = _parts(chat)
            for number, part in enumerate(parts):
                if found := _BLOCK.findall(part):
                    changes = tuple(Change(*block) for block in found)
                    said = part[: part.index(f"{found[0][0]}\n```")].strip()
                    before = tuple(map(Message, parts[:number]))
                    yield Edit("aider", path.stem, before, said, part.strip(), changes)


def _parts(text: str) -> list[str]:
    """The turns of a log: messages to the model, whose lines are marked, and its answers."""
    parts, told = [""], True
    for line in text.splitlines():
        marked = _TOLD.match(line)
        if line and told != bool(marked):
            told = bool(marked)
            parts.append("")
        parts[-1] += f"{marked[1] if marked else line}\n"
    return parts


def tasks(folder: Path) -> Iterator[Edit]:
    """CanItEdit's ``CanItEdit/*.jsonl``: an instruction, a file before, and a person's file after."""
    for path in sorted(folder.rglob("CanItEdit/*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            task = json.loads(line)
            before, after = (f"{task[side].rstrip()}\n" for side in ("before", "after"))
            file = f"{task['name']}.py"
            said = f"I will change `{file}`."
            name, asked = task["full_name"], (Message(task["instruction_descriptive"]),)
            yield Edit("CanItEdit", name, asked, said, "", (Change(file, before, after),), before)


#: Those of its questions whose reference is a whole answer.
_ANSWERED = ("translation", "summarization", "math_reasoning")


def questions(folder: Path) -> Iterator[Edit]:
    """Spec-Bench's ``spec_bench/question.jsonl``: a question, and people's answer, which edits nothing."""
    for path in sorted(folder.rglob("spec_bench/question.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            question = json.loads(line)
            if question["category"] in _ANSWERED:
                name, [answer] = f"Spec-Bench {question['question_id']}", question["reference"]
                yield Edit("Spec-Bench", name, tuple(map(Message, question["turns"])), answer, answer, ())


#: Every reader takes a folder and finds its own files there.
READERS: tuple[Callable[[Path], Iterator[Edit]], ...] = (trajectories, patches, transcripts, tasks, questions)


def read(folders: list[Path], half: str, most: int, seed: int) -> dict[str, list[Edit]]:
    """Collection → at most so many of its edits of one half, and as many answers that edit nothing; by a hash."""
    found: dict[str, list[tuple[int, Edit]]] = {}
    for folder in folders:
        for reader in READERS:
            for number, edit in enumerate(reader(folder)):
                if edit.half == half:
                    name = edit.collection + ("" if edit.call or edit.changes else ", no edit")
                    rank = hash_of(str(seed), edit.collection, edit.name, str(number))
                    found.setdefault(name, []).append((rank, edit))
    ranked = {name: sorted(edits, key=lambda ranked: ranked[0]) for name, edits in sorted(found.items())}
    return {name: [edit for _, edit in edits[:most]] for name, edits in ranked.items()}


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


class Exchange(NamedTuple):
    """The messages of one request, and the answer to it."""

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
    "JSON": lambda path, text: _as_json({"path": path, "content": text}),
}


def thoughts(edit: Edit) -> str:
    """The text of an answer before its action, if it has one."""
    said = edit.said.partition("```")[0].strip()
    return said if edit.written and said != edit.written.strip() else ""


def lines_call(edit: Edit) -> str:
    """SWE-agent's edit by line numbers as a tool call."""
    if edit.call is None:
        return ""
    first, last, new = edit.call
    return _call("edit", start_line=first, end_line=last, replacement_text=new)


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


def patch_call(edit: Edit) -> str:
    """Codex's patch in a tool call."""
    files = (
        f"*** Update File: {change.path}\n" + "".join(f"@@\n{body}" for body, _, _ in hunks(change))
        for change in edit.changes
        if change.before != change.after
    )
    body = "".join(files)
    return _call("apply_patch", input=f"*** Begin Patch\n{body}*** End Patch") if body else ""


#: How a change is written: answer → "" where the edit has no such form.
WRITE: dict[str, Callable[[Edit], str]] = {
    "as written": lambda edit: edit.written,
    "thoughts": thoughts,
    "edit by lines, tool call": lines_call,
    "whole file, tool call": whole_call,
    "old and new text, tool call": replace_call,
    "apply_patch, tool call": patch_call,
}
#: Of these, what the model wrote itself.
_OWN = ("as written", "thoughts")
#: What is more than text, or stands before it.
_OF_TOOLS = ("tool call", "thoughts")
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
            alone = name in _OWN or not edit.said.strip()
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
    return _as_json({"name": name, "arguments": arguments})


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
