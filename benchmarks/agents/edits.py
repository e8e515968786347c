"""Answers out of public collections that a user has cloned: what the model was shown, what it wrote, and the same
change as tool calls.

A folder may be a checkout or any part of one; files are told by their names. Nothing of a collection is kept here.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.corpus.files import hash_of

#: A hash of its task's name says in which half an answer is; settings are chosen on the first.
HALVES = ("seen", "held-out")
#: Lines before and after a change that an answer repeats.
CONTEXT = 3
#: How a change is written.
AS_WRITTEN, BY_LINES = "as written", "edit by lines, tool call"
WHOLE_FILE, OLD_AND_NEW = "whole file, tool call", "old and new text, tool call"


class Message(NamedTuple):
    """Of a conversation, before the answer."""

    text: str
    is_result: bool = False  # of a tool


class Answer(NamedTuple):
    """One answer of a model, or of a person in its place."""

    collection: str
    task: str
    messages: tuple[Message, ...]  # oldest first, the model's own too
    forms: dict[str, str]  # how it is written → the whole answer
    is_edit: bool = True
    read: str = "as shown"  # how the messages show a file

    @property
    def half(self) -> str:
        return HALVES[hash_of("agents", self.task) % 2]


def _call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _replacing(path: str, before: str, after: str) -> str:
    """Calls with old and new text of each hunk. Both texts end in a line feed."""
    hunks: list[tuple[list[str], list[str]]] = []
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), n=CONTEXT)
    for line in islice(lines, 2, None):
        if line.startswith("@@"):
            hunks.append(([], []))
            continue
        for side, kept in zip(hunks[-1], (" -", " +"), strict=True):
            side += [line[1:]] * (line[0] in kept)
    pairs = (("".join(old), "".join(new)) for old, new in hunks)
    return "\n".join(_call("str_replace", path=path, old_str=old, new_str=new) for old, new in pairs)


def _forms(written: str, said: str, **calls: str) -> dict[str, str]:
    """Of the answer as it was written, and of calls after what it said before its change; those that there are."""
    before = f"{said}\n\n" if said.strip() else ""
    names = {"lines": BY_LINES, "whole": WHOLE_FILE, "replacing": OLD_AND_NEW}
    made = {names[name]: before + call for name, call in calls.items() if call}
    return {AS_WRITTEN: written, **made} if written else made


#: SWE-agent shows so many observations whole, and only the number of lines of those before.
LAST_OBSERVATIONS = 5
_LISTING = re.compile(r"^\[File: (?P<path>\S+) \(\d+ lines total\)\]\n", re.MULTILINE)
_NUMBERED = re.compile(r"^(\d+):(.*)$")
_EDIT = re.compile(r"^edit (\d+):(\d+)\n(.*?)^end_of_edit$", re.MULTILINE | re.DOTALL)


def trajectories(folder: Path) -> Iterator[Answer]:
    """SWE-agent's ``TASK.traj``: edits by line numbers of files that were shown with them, and other answers."""
    for path in sorted(folder.rglob("*.traj")):
        collection = "Multi-SWE-bench" if path.parent.name == "trajs" else "SWE-agent"
        shown: list[str] = []
        observed: list[int] = []  # which of them are observations: all after the model's first answer
        answered: set[str] = set()
        for message in json.loads(path.read_text(encoding="utf-8"))["history"]:
            text = message.get("content") or ""
            if message["role"] != "assistant":
                observed += [len(shown)] if answered else []
            elif text not in answered:  # some repeat themselves to the end
                answered.add(text)
                old = observed[:-LAST_OBSERVATIONS]
                lines = {at: f"Old output omitted ({shown[at].count(chr(10)) + 1} lines)" for at in old}
                told = (Message(lines.get(at, each), at in observed) for at, each in enumerate(shown))
                yield _of_lines(collection, path.stem, tuple(told), text)
            shown.append(text)


def _of_lines(collection: str, task: str, shown: tuple[Message, ...], text: str) -> Answer:
    if (found := _EDIT.search(text)) is None:
        return Answer(collection, task, shown, {AS_WRITTEN: text}, is_edit=False)
    first, last, new = int(found[1]), int(found[2]), found[3]
    call = _call("edit", start_line=first, end_line=last, replacement_text=new)
    path, lines, replacing = "", {}, ""
    for message in reversed(shown):  # the path and the numbered lines of the file that was shown last
        if headers := list(_LISTING.finditer(message.text)):
            listed = map(_NUMBERED.match, message.text[headers[-1].end() :].split("\n"))
            path, lines = headers[-1]["path"], {int(line[1]): line[2] for line in listed if line}
            break
    if all(number in lines for number in range(first, last + 1)):
        old = [f"{line}\n" for line in lines.values()]
        start, end = (list(lines).index(number) for number in (first, last))
        after = [*old[:start], new, *old[end + 1 :]]
        replacing = _replacing(path.lstrip("/"), "".join(old), "".join(after))
    said = text[: found.start()].rstrip("` \n")
    return Answer(collection, task, shown, _forms(text, said, lines=call, replacing=replacing))


def tasks(folder: Path) -> Iterator[Answer]:
    """CanItEdit's ``CanItEdit/*.jsonl``: an instruction, a file before, and a person's file after."""
    texts = (path.read_text(encoding="utf-8") for path in sorted(folder.rglob("CanItEdit/*.jsonl")))
    for task in (json.loads(line) for text in texts for line in text.splitlines()):
        before, after = (f"{task[side].rstrip()}\n" for side in ("before", "after"))
        file = f"{task['name']}.py"
        numbered = (f"{number:6}\t{line}\n" for number, line in enumerate(before.splitlines(), 1))
        shown = f"Here's the result of running `cat -n` on {file}:\n{''.join(numbered)}"
        messages = (Message(task["instruction_descriptive"]), Message(shown, is_result=True))
        whole = _call("write_file", path=file, content=after)
        calls = {"whole": whole, "replacing": _replacing(file, before, after)}
        forms = _forms("", f"I will change `{file}`.", **calls)
        yield Answer("CanItEdit", task["full_name"], messages, forms, read="numbered")


#: Every reader takes a folder and finds its own files there.
READERS: tuple[Callable[[Path], Iterator[Answer]], ...] = (trajectories, tasks)


def read(folders: list[Path], half: str, most: int) -> dict[str, list[Answer]]:
    """Collection → at most so many of its edits of one half, and as many answers that edit nothing; by a hash."""
    found: dict[str, list[tuple[int, Answer]]] = {}
    for folder, reader in product(folders, READERS):
        for number, answer in enumerate(reader(folder)):
            if answer.half == half:
                rank = hash_of("0", answer.collection, answer.task, str(number))
                name = answer.collection + ", no edit" * (not answer.is_edit)
                found.setdefault(name, []).append((rank, answer))
    ranked = {name: sorted(found[name], key=lambda pair: pair[0]) for name in sorted(found)}
    return {name: [answer for _, answer in pairs[:most]] for name, pairs in ranked.items()}
