"""Records made of two files, or of the edits in a Git history: the old text predicts the new one."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpu_align.simulate.records import Record
from gpu_align.simulate.tokenizers import load_tokenizer

#: Larger files of a history are left out.
MAX_FILE_BYTES = 256 * 1024
#: Edits of a history that are taken where nobody sets a limit.
DEFAULT_LIMIT = 100


class EditError(ValueError):
    """There is no edit to replay; the message names the file or the range, and why."""


def records_of_files(before: Path, after: Path, tokenizer: str) -> list[Record]:
    """One record: the text of `before` is the prediction, that of `after` the output.

    Raises:
        EditError: a file is not UTF-8 text, or `after` is empty.
        OSError: a file cannot be read.
        ValueError: the tokenizer cannot be loaded.
        MissingExtraError: the tokenizer's package is not installed.
    """
    old, new = _text_of(before), _text_of(after)
    if not new:
        raise EditError(f"{after}: expected text, found an empty file")
    return [_record(after.name, old, new, tokenizer)]


def records_of_git(
    revisions: str, repo: Path, tokenizer: str, suffixes: Sequence[str] = (), limit: int | None = None
) -> list[Record]:
    """The text files that the commits of a range changed, newest first; merges are left out.

    Args:
        revisions: what ``git log`` takes, ``v1.0..v1.1`` or ``HEAD~20..``.
        repo: a work tree, a folder in it, or a bare repository.
        tokenizer: ``"tekken"``, or what transformers can load.
        suffixes: only files whose names end in one of these, if there are any.
        limit: at most so many records, `DEFAULT_LIMIT` if None.

    Raises:
        EditError: Git is missing or refuses the range, or the range changes no text file.
        ValueError: the tokenizer cannot be loaded.
        MissingExtraError: the tokenizer's package is not installed.
    """
    if not revisions or revisions.startswith("-"):
        raise EditError(f"--git: expected a range such as HEAD~20.., found {revisions!r}")
    edits = list(
        itertools.islice(_edits(revisions, repo, tuple(suffixes)), DEFAULT_LIMIT if limit is None else limit)
    )
    if not edits:
        ending = f" that ends in {' or '.join(suffixes)}" if suffixes else ""
        raise EditError(f"--git: {revisions} changes no text file{ending}")
    return [_record(name, old, new, tokenizer) for name, old, new in edits]


def _record(name: str, old: str, new: str, tokenizer: str) -> Record:
    encode = load_tokenizer(tokenizer).encode
    return Record(name, [], encode(old) if old else [], encode(new), tokenizer)


def _edits(revisions: str, repo: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    """``(commit:path, old text, new text)``."""
    log = _git(repo, "log", "--no-merges", "--format=%H", "--end-of-options", revisions, "--")
    for commit in log.decode().split():
        raw = _git(repo, "diff-tree", "-r", "-z", "--no-commit-id", "--diff-filter=M", commit)
        fields = raw.decode("utf-8", "surrogateescape").split("\0")
        for meta, path in zip(fields[::2], fields[1::2], strict=False):
            old_mode, new_mode, *blobs, _ = meta.lstrip(":").split()
            if not (old_mode.startswith("100") and new_mode.startswith("100")):
                continue  # a link or a submodule
            if suffixes and not path.endswith(suffixes):
                continue
            old, new = (_blob(repo, blob) for blob in blobs)
            if old and new and old != new:
                shown = path.encode("utf-8", "replace").decode()
                yield f"{commit[:10]}:{shown}", old, new


def _blob(repo: Path, name: str) -> str | None:
    """The text of a blob; None where it is too large or not text."""
    if int(_git(repo, "cat-file", "-s", name)) > MAX_FILE_BYTES:
        return None
    return _decoded(_git(repo, "cat-file", "blob", name))


def _git(repo: Path, *arguments: str) -> bytes:
    command = ["git", "-C", str(repo), *arguments]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        raise EditError(f"--git needs git: {error.strerror or error}") from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise EditError(f"--git: {said[0].removeprefix('fatal: ')}")
    return done.stdout


def _text_of(path: Path) -> str:
    text = _decoded(path.read_bytes())
    if text is None:
        raise EditError(f"{path}: expected UTF-8 text, found other bytes")
    return text


def _decoded(content: bytes) -> str | None:
    """UTF-8 text without its byte order mark, line ends as LF; None where it is not text."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text.replace("\r\n", "\n").replace("\r", "\n")
