"""Files that several commands read: JSON lines, plain or gzipped, texts, and edits of a Git history."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import itertools
import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

from ..ops.files import Domain, Text, checked, expect

_GZIP_MAGIC = b"\x1f\x8b"
#: Gzipped text beyond so many bytes is at most so many times as long as the file; most is four to ten times.
MAX_BYTES, MOST_PACKED = 1 << 25, 32
#: Whether code that comes with a tokenizer may run, as ``--trust-remote-code`` says. transformers would ask.
trusts_code = False


class RecordError(ValueError):
    """A line is not a record. line: its number in the file, from 1; 0 for an error of the whole file."""

    def __init__(self, line: int, message: str) -> None:
        self.line = line
        super().__init__(f"line {line}: {message}" if line else message)


@contextlib.contextmanager
def at_line(line: int) -> Iterator[None]:
    """Make a RecordError of an error about this line."""
    try:
        yield
    except RecordError:
        raise
    except (ValueError, OSError) as error:
        raise RecordError(line, str(error)) from error


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(number, object)`` of each line that is not empty; a gzipped file is told by its first two bytes.

    RecordError: a line is not UTF-8, no JSON, or no object; damaged gzip data, or such of far too much text.
    OSError: the file cannot be read.
    """
    number = 0
    try:
        with path.open("rb") as file:
            # A pipe gives its bytes once.
            raw: BinaryIO = file if file.seekable() else io.BytesIO(file.read())
            packed = raw.read(2) == _GZIP_MAGIC
            left = max(MAX_BYTES, MOST_PACKED * raw.seek(0, os.SEEK_END)) if packed else sys.maxsize - 1
            raw.seek(0)
            stream = gzip.GzipFile(fileobj=raw) if packed else raw
            while line := stream.readline(left + 1):
                number += 1
                left -= len(line)
                if left < 0:
                    why = "gzip data of far more text than texts pack to; unpack it to use it"
                    raise RecordError(number, why)
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if text.strip():
                    yield number, _object(number, text)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecordError(number + 1, f"damaged gzip data ({error})") from error


def _object(line: int, raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RecordError(line, f"expected UTF-8, found byte 0x{raw[error.start]:02x}") from error
    except RecursionError as error:
        raise RecordError(line, "expected one JSON object, found brackets nested too deeply") from error
    except ValueError as error:  # JSONDecodeError, and integers with more digits than Python reads
        raise RecordError(line, f"expected one JSON object ({error})") from error
    with at_line(line):
        found: dict[str, Any] = checked(dict, fields)
    return found


Identifier = Annotated[Any, Domain("a string or an integer", lambda value: type(value) in (str, int))]
_Filled = Annotated[Text, Domain("a text that is not empty", str.strip)]


@dataclass(frozen=True)
class Pair:
    """One edit: what is asked for, the text before it, and the text after it where it is known."""

    id: str
    instruction: str
    before: str
    after: str | None = None
    prompt: str | None = None  #: the whole user message; None: made of `instruction` and `before`
    alternatives: tuple[str, ...] = ()  #: predicted beside `before`

    def messages(self) -> list[dict[str, str]]:
        """The chat request that asks for this edit."""
        content = self.prompt or (
            f"{self.instruction}\n\nAnswer with the whole edited text and nothing else: no Markdown fence, "
            f"no explanation.\n\n{self.before}"
        )
        return [{"role": "user", "content": content}]


@dataclass
class PairFields:
    """A line of a file of edits."""

    id: Identifier
    before: _Filled
    instruction: _Filled | None = None
    after: _Filled | None = None
    prompt: _Filled | None = None
    alternatives: list[_Filled] | None = None


#: Fields of a `Pair` in a record of texts, as `simulate` reads it.
_IN_RECORD = {"before": "prediction_text", "after": "output_text", "prompt": "prompt_text"}


def pair_of(fields: Mapping[str, Any]) -> Pair:
    """``{"id", "instruction", "before", "alternatives"?, "after"?, "prompt"?}``, or a record of texts, where
    ``prompt_text`` makes the instruction superfluous. ValueError where it is neither."""
    if isinstance(several := fields.get("predictions_text"), list) and several:
        fields = {**fields, "prediction_text": several[0], "alternatives": several[1:]}
    if "prediction_text" in fields:
        fields = {**fields, **{name: fields.get(field) for name, field in _IN_RECORD.items()}}
    found: PairFields = checked(PairFields, fields)
    expect(found.instruction or found.prompt, "instruction", "a text", found.instruction)
    others = tuple(found.alternatives or ())
    return Pair(str(found.id), found.instruction or "", found.before, found.after, found.prompt, others)


class EditError(ValueError):
    """There is no edit to read; the message, one line, names the file or the range, and why."""


def files_in(place: Path, suffixes: Sequence[str] = ()) -> list[Path]:
    """The file `place`, or all files in that folder, sorted; FileNotFoundError: it is not there.

    Of a folder, hidden files and folders are left out, links are not followed, and only names that end in one of
    `suffixes` are taken, if there are any.
    """
    if not place.exists():
        raise FileNotFoundError(f"{place}: no such file or folder")
    found = [] if place.is_dir() else [place]
    for parent, folders, names in os.walk(place):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        shown = [name for name in sorted(names) if not name.startswith(".")]
        paths = [Path(parent, name) for name in shown if name.endswith(tuple(suffixes or [""]))]
        found += [path for path in paths if path.is_file() and not path.is_symlink()]
    return found


def text_of(content: bytes) -> str | None:
    """UTF-8 text without its byte order mark, line ends as LF; None where it is not text."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else with_line_feeds(text)


def with_line_feeds(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def text_file(path: Path) -> str:
    """The text of a file; EditError where it is none, OSError where it cannot be read."""
    text = text_of(path.read_bytes())
    if text is None:
        raise EditError(f"{path}: expected UTF-8 text, found other bytes")
    return text


class GitEdit(NamedTuple):
    """A file that a commit modified: the commit's first 10 digits and subject, and the texts before and after."""

    commit: str
    subject: str
    path: str
    before: str
    after: str


#: Of git's variables, those that say where it is, and where the user's configuration, which names the folders that
#: are trusted. All others would name another repository, as in a hook, or change what is printed.
_GIT_KEPT = re.compile(r"GIT_(EXEC_PATH|CONFIG_(GLOBAL|SYSTEM|NOSYSTEM|COUNT|KEY_\d+|VALUE_\d+))$|(?!GIT_)")


def git(repo: Path, *arguments: str) -> bytes:
    """Run a plumbing command in `repo` and return its output, whatever the environment and the configuration say:
    such commands know no colours, pagers, signatures or external diffs. EditError: git is missing, or refuses."""
    env = {name: value for name, value in os.environ.items() if _GIT_KEPT.match(name)}
    env |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
    command = ["git", "--no-pager", "-C", str(repo), *arguments]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=env)
    except OSError as error:
        raise EditError(f"--git needs git: {error.strerror or error}") from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
        found = next((line for line in said if line.startswith("fatal: ")), said[0])
        raise EditError(f"--git: {found.removeprefix('fatal: ')}")
    return done.stdout


def git_edits(
    revisions: str, repo: Path, limit: int, max_bytes: int, suffixes: Sequence[str] = ()
) -> list[GitEdit]:
    """The text files that the commits of a range modified, newest first; no merges, links or submodules.

    At most `limit` of them, and only such of at most `max_bytes` whose names end in one of `suffixes`, if there
    are any. EditError: Git is missing or refuses the range, or there is no such file.
    """
    found = list(itertools.islice(_git_edits(revisions, repo, max_bytes, tuple(suffixes)), limit))
    if not found:
        ending = f" that ends in {' or '.join(suffixes)}" if suffixes else ""
        raise EditError(f"--git: {revisions} changes no text file{ending} of at most {max_bytes:,} bytes")
    return found


def _git_edits(revisions: str, repo: Path, max_bytes: int, suffixes: tuple[str, ...]) -> Iterator[GitEdit]:
    if not revisions or revisions.startswith("-"):
        raise EditError(f"--git: expected a range such as HEAD~20.., found {revisions!r}")

    def text(blob: str) -> str | None:
        too_large = int(git(repo, "cat-file", "-s", blob)) > max_bytes
        return None if too_large else text_of(git(repo, "cat-file", "blob", blob))

    form = "--format=%x00%H%x00%s%x00"  # a subject may hold anything but NUL; `commit …` stands before each
    log = git(repo, "rev-list", "--no-merges", "--encoding=UTF-8", form, "--end-of-options", revisions, "--")
    told = log.decode("utf-8", "replace").split("\0")
    for commit, subject in zip(told[1::3], told[2::3], strict=True):
        raw = git(repo, "diff-tree", "-r", "-z", "--no-commit-id", "--no-renames", "--diff-filter=M", commit)
        fields = raw.decode("utf-8", "surrogateescape").split("\0")
        for meta, path in zip(fields[::2], fields[1::2], strict=False):
            old_mode, new_mode, old, new, _ = meta.lstrip(":").split()
            if not (old_mode.startswith("100") and new_mode.startswith("100")):
                continue  # a link or a submodule
            if suffixes and not path.endswith(suffixes):
                continue
            before, after = text(old), text(new)
            if before and after and before != after:
                yield GitEdit(commit[:10], subject, path.encode("utf-8", "replace").decode(), before, after)
