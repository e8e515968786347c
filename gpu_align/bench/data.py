"""Where edits come from: a file of pairs, a Git history, two files, or the set that is shipped."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from gpu_align.bench.errors import BenchError

#: Files of a Git history beyond this size are left out.
MAX_FILE_BYTES = 48 * 1024
SHIPPED = "the shipped set"

_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class Pair:
    """One edit: what is asked for, the text before it, and the text after it where it is known.

    `prompt` is the whole user message, for data that has one; else it is made of `instruction` and `before`.
    """

    id: str
    instruction: str
    before: str
    after: str | None = None
    prompt: str | None = None

    def messages(self) -> list[dict[str, str]]:
        """Return the chat request that asks for this edit."""
        content = self.prompt or (
            f"{self.instruction}\n\nAnswer with the whole edited text and nothing else: no Markdown fence, "
            f"no explanation.\n\n{self.before}"
        )
        return [{"role": "user", "content": content}]


def read_pairs(path: Path) -> list[Pair]:
    """Read ``{"id", "instruction", "before", "after"?, "prompt"?}``, one JSON object a line, plain or gzipped.

    Empty lines are skipped, unknown fields ignored.

    Raises:
        BenchError: the file cannot be read, has no pair, or a line is none; names the line.
    """
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw.startswith(_GZIP_MAGIC) else raw
    except OSError as error:
        raise BenchError(f"--dataset: {path}: {error.strerror or error}", usage=True) from error
    except (EOFError, zlib.error) as error:
        raise BenchError(f"--dataset: {path}: damaged gzip data ({error})", usage=True) from error
    return _parse_lines(text, f"--dataset: {path}")


def shipped_pairs() -> list[Pair]:
    """Return the edits that come with the package."""
    text = resources.files("gpu_align.bench").joinpath("pairs.jsonl").read_bytes()
    return _parse_lines(text, SHIPPED)


def pair_of_files(before: Path, after: Path | None, instruction: str | None) -> Pair:
    """Return one pair of two files.

    Raises:
        BenchError: a file cannot be read or is no text, or both are the same.
    """
    old = _text_file(before, "--before")
    new = None if after is None else _text_file(after, "--after")
    if not old.strip():
        raise BenchError(f"--before: {before}: expected a text, found an empty file", usage=True)
    if new == old:
        raise BenchError(f"--after: {after} is equal to {before}: there is no edit", usage=True)
    if instruction is None and new is None:
        raise BenchError("--before without --after needs --instruction", usage=True)
    return Pair(before.name, instruction or _instruction_of(old, new or old), old, new)


def pairs_from_git(repo: Path, revisions: str, limit: int) -> list[Pair]:
    """Return the modified text files of the commits in a range, newest first; the subject is the instruction.

    Args:
        repo: a Git work tree, or a bare repository.
        revisions: what ``git log`` takes, such as ``v1.0..v1.1`` or ``HEAD~50..``.
        limit: at most so many pairs.

    Raises:
        BenchError: Git is missing or refuses the range, or the range has no modified text file.
    """
    if revisions.startswith("-"):
        raise BenchError(f"--from-git: expected a range such as HEAD~50.., found {revisions!r}", usage=True)
    found = list(_limited(_git_pairs(repo, revisions), limit))
    if not found:
        raise BenchError(
            f"--from-git: {revisions} has no modified text file of at most {MAX_FILE_BYTES:,} bytes",
            usage=True,
        )
    return found


def _limited(pairs: Iterator[Pair], limit: int) -> Iterator[Pair]:
    for _, pair in zip(range(limit), pairs, strict=False):
        yield pair


def _git_pairs(repo: Path, revisions: str) -> Iterator[Pair]:
    log = _git(repo, "log", "--no-merges", "--format=%H %s", "--end-of-options", revisions, "--").decode(
        "utf-8", "replace"
    )
    for line in log.splitlines():
        commit, _, subject = line.partition(" ")
        raw = _git(repo, "diff-tree", "-r", "-z", "--root", "--no-commit-id", "--diff-filter=M", commit)
        fields = raw.decode("utf-8", "surrogateescape").split("\0")
        for meta, name in zip(fields[::2], fields[1::2], strict=False):
            old_mode, new_mode, old, new, _ = meta.lstrip(":").split()
            if not (old_mode.startswith("100") and new_mode.startswith("100")):
                continue  # a link or a submodule
            before, after = _blob(repo, old), _blob(repo, new)
            if before and after and before != after:
                shown = name.encode("utf-8", "replace").decode()
                yield Pair(f"{commit[:10]}:{shown}", f"Change the file {shown}: {subject}", before, after)


def _blob(repo: Path, name: str) -> str | None:
    """The text of a blob; None when it is too long or no text."""
    if int(_git(repo, "cat-file", "-s", name)) > MAX_FILE_BYTES:
        return None
    data = _git(repo, "cat-file", "blob", name)
    try:
        return None if b"\0" in data else data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _git(repo: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-C", str(repo), *arguments], stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError as error:
        raise BenchError(f"--from-git needs git: {error.strerror or error}", usage=True) from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise BenchError(f"--from-git: {repo}: git: {said[0].removeprefix('fatal: ')}", usage=True)
    return done.stdout


def _text_file(path: Path, option: str) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise BenchError(f"{option}: {path}: {error.strerror or error}", usage=True) from error
    except UnicodeDecodeError as error:
        raise BenchError(
            f"{option}: {path}: expected UTF-8, found byte 0x{error.object[error.start]:02x}", usage=True
        ) from error


def _instruction_of(before: str, after: str) -> str:
    """What to ask for when only the texts are known: the edit itself, as a diff."""
    import difflib

    diff = difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", n=1, lineterm="")
    return "Apply this diff to the text below.\n\n" + "\n".join(diff)


def _parse_lines(raw: bytes, source: str) -> list[Pair]:
    pairs: list[Pair] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(io.BytesIO(raw.removeprefix(b"\xef\xbb\xbf")), start=1):
        if not line.strip():
            continue
        try:
            pair = _parse(line)
        except ValueError as error:
            raise BenchError(f"{source}: line {number}: {error}", usage=True) from error
        if pair.id in lines:
            raise BenchError(
                f'{source}: line {number}: "id": {pair.id!r} is also that of line {lines[pair.id]}',
                usage=True,
            )
        lines[pair.id] = number
        pairs.append(pair)
    if not pairs:
        raise BenchError(f"{source}: expected at least one pair, found none", usage=True)
    return pairs


def _parse(line: bytes) -> Pair:
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8, found byte 0x{line[error.start]:02x}") from error
    except RecursionError as error:
        raise ValueError("expected one JSON object, found brackets nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"expected one JSON object ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, found {type(fields).__name__}")
    identifier = fields.get("id")
    if isinstance(identifier, bool) or not isinstance(identifier, (str, int)):
        raise ValueError('"id": expected a string or an integer' + _found(fields, "id"))
    texts = (_text(fields, "instruction"), _text(fields, "before"))
    return Pair(str(identifier), *texts, _optional(fields, "after"), _optional(fields, "prompt"))


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ValueError(f'"{name}": expected a string{_found(fields, name)}')
    if not value.strip():
        raise ValueError(f'"{name}": expected a text, found an empty one')
    return value


def _optional(fields: Mapping[str, Any], name: str) -> str | None:
    return None if fields.get(name) is None else _text(fields, name)


def _found(fields: Mapping[str, Any], name: str) -> str:
    return f", found {type(fields[name]).__name__}" if name in fields else ", found no such field"
