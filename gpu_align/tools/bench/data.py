"""Where edits come from: a file of pairs, a Git history, two files, or the set that is shipped."""

from __future__ import annotations

import difflib
import gzip
import io
import json
import math
import random
import re
import subprocess
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from .client import BenchError

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
    text = resources.files("gpu_align.tools.bench").joinpath("pairs.jsonl").read_bytes()
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


Choice = Literal["auto", "before", "output"]
#: With `auto` the text before the edit is the prediction if this share of the output's word pairs is in it.
RESEMBLES = 0.5

_PIECE_CHARS = 48
_WORDS = re.findall(
    r"\w+",
    """
    amber anchor apricot barley beacon bishop bramble candle canvas cellar cinder clover copper cradle
    dapple drizzle ember fennel ferry flannel gable garnet ginger glacier gravel hamlet harbour hazel
    heather hollow indigo ivory jasmine juniper kestrel kettle ladder lantern lavender lichen linen maple
    marble meadow mitten mortar muslin nettle nickel oatmeal orchard otter paddle parsley pebble pewter
    pigeon plume poplar quarry quiver raven ribbon rivet russet saddle saffron sandal shutter sparrow
    spindle steeple sultan tallow tartan thimble thistle timber trellis turnip umber valley velvet vessel
    walnut warbler wicker willow winter yarrow yonder zephyr
""",
)


@dataclass(frozen=True)
class Predictions:
    """A prediction and a useless one for each pair, and a sentence on where they come from.

    Attributes:
        useful: [P] one a pair.
        unrelated: [P] of about the same lengths.
        sources: [P] ``"before"`` or ``"output"``.
    """

    useful: list[str]
    unrelated: list[str]
    sources: list[str]

    def sentence(self) -> str:
        """Say where the predictions come from."""
        total, edited = len(self.sources), self.sources.count("output")
        if not edited:
            return "Each prediction is the text before the edit, as a client would send it."
        real = "with the edits of its pair, or with typed ones where the pair has no text after the edit"
        if edited == total:
            return f"Each prediction is the output of the first run {real}."
        return (
            f"{total - edited} of {total} predictions are the text before the edit. {edited} are the output of "
            f"the first run {real}, because the output hardly resembled the text before the edit."
        )


def make_predictions(pairs: Sequence[Pair], outputs: Sequence[str], choice: Choice) -> Predictions:
    """Choose a prediction for each pair, after the first run.

    Args:
        pairs: [P] the edits.
        outputs: [P] what the model wrote in the first run.
        choice: ``"before"``: the text before the edit; ``"output"``: the output with edits; ``"auto"``: the
            first where the output resembles it, else the second.
    """
    useful, sources = [], []
    for pair, output in zip(pairs, outputs, strict=True):
        before = choice == "before" or (choice == "auto" and resemblance(output, pair.before) >= RESEMBLES)
        sources.append("before" if before else "output")
        useful.append(pair.before if before else edited(output, pair))
    unrelated = [unrelated_text(len(text), pair.id) for text, pair in zip(useful, pairs, strict=True)]
    return Predictions(useful, unrelated, sources)


def resemblance(output: str, text: str) -> float:
    """The share of the output's pairs of neighbouring words that are in the text, too, counted with repetition."""
    written, known = (Counter(pairwise(each.split())) for each in (output, text))
    return (written & known).total() / max(1, written.total())


def edited(output: str, pair: Pair) -> str:
    """The output as if it had still to be edited: the pair's own edits undone in it, at the same places.

    Each hunk of the diff from `after` back to `before` is carried to the same share of the output's lines. Without
    `after`, or if nothing changes, a few edits of a person are typed into it (`typed_edits`).
    """
    if pair.after is None:
        return typed_edits(output, pair.id)
    after, before = pair.after.splitlines(keepends=True), pair.before.splitlines(keepends=True)
    pieces = _pieces(output)
    share = min(1.0, len(pieces) / max(1, len(after)))
    hunks = difflib.SequenceMatcher(None, after, before, autojunk=False).get_opcodes()
    for kind, start, end, other_start, other_end in reversed(hunks):
        if kind == "equal":
            continue
        at = round(start / max(1, len(after)) * len(pieces))
        removed = math.ceil((end - start) * share)
        inserted = math.ceil((other_end - other_start) * share)
        pieces[at : at + removed] = before[other_start : other_start + inserted]
    changed = "".join(pieces)
    return changed if changed and changed != output else typed_edits(output, pair.id)


def typed_edits(text: str, seed: str) -> str:
    """A text with a few edits: a name changed, a number or a word, a line deleted, another inserted."""
    rng = random.Random(seed)
    names = Counter(re.findall(r"[A-Za-z_]\w{2,}", text))
    if names:
        name = rng.choice([name for name, _ in names.most_common(3)])
        text = re.sub(rf"\b{re.escape(name)}\b", f"{name}_{rng.choice(_WORDS)}", text, count=3)
    pieces = _pieces(text)
    for _ in range(max(1, len(pieces) // 40)):
        at = rng.randrange(len(pieces)) if pieces else 0
        pieces[at : at + 1] = rng.choice(([], [*pieces[at : at + 1], f"{rng.choice(_WORDS)}\n"]))
    return "".join(pieces) or rng.choice(_WORDS)


def unrelated_text(length: int, seed: str) -> str:
    """Random words, about `length` characters: a prediction that no answer follows."""
    rng = random.Random(f"unrelated {seed}")
    words: list[str] = []
    written = 0
    while written < max(length, 1):
        words.append(rng.choice(_WORDS) + (".\n" if rng.random() < 0.1 else ""))
        written += len(words[-1]) + 1
    return " ".join(words)


def _pieces(text: str) -> list[str]:
    """The lines of a text; for a text of few and long lines, pieces of some words each."""
    lines = text.splitlines(keepends=True)
    if len(lines) * 2 * _PIECE_CHARS > len(text):
        return lines
    return re.findall(rf"(?s).{{1,{_PIECE_CHARS}}}(?:\s+|$)|.{{1,{_PIECE_CHARS}}}", text)
