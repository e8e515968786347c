"""``gpu-align recipes``: its commands, the texts that they learn from, and the samples and outputs of a model."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ... import __version__
from .. import console
from ..console import counted, option, refuse, refusing
from ..inputs import files_in, json_lines, text_of

if TYPE_CHECKING:
    from ...recipes.pack import RecipePack
    from ...recipes.tokenize import Encode, Observed
    from .report import PackReport


def read_lines(path: Path, field: str) -> list[tuple[str, str, Any]]:
    """Task and prompt, which may be left out, and ``samples`` or ``output`` of each line of JSON."""
    from ...ops.files import Text, checked

    found = []
    with refusing(path, f"{path}: "):
        for number, line in json_lines(path):
            row = {"task": "", "prompt": "", **line}
            for name in (field, "task", "prompt"):
                kind = list[Text] if name == "samples" else Text
                checked(kind, row.get(name), f"line {number}: {name}")
            found.append((row["task"], row["prompt"], row[field]))
    if not found:
        refuse(f"{path}: expected lines of JSON, found none")
    return found


class SourceTexts:
    """The files of `places` (`files_in`), each place a source: ``(source, path)``, each once, in the first place.

    `num_read`, `num_bytes` and `sources` are of the files whose text `read` yielded, `skipped` counts the others.
    """

    def __init__(self, places: Sequence[Path], suffixes: Sequence[str] = ()) -> None:
        files: dict[Path, tuple[str, Path]] = {}
        for place in places:
            for path in files_in(place, suffixes):
                files.setdefault(path.resolve(), (str(place.resolve()), path))
        self.files = list(files.values())
        self.num_read = self.num_bytes = 0
        self.skipped: Counter[str] = Counter()
        self.sources: set[str] = set()

    def read(self, told: Callable[[str, int], None]) -> Iterator[tuple[str, str]]:
        """``(source, text)`` of each file, line ends normalised to LF; `told` is called for each, text or not."""
        given = set()
        for source, path in self.files:
            told(Path(source).name, 1)
            try:
                content = path.read_bytes()
            except OSError:
                self.skipped["not readable"] += 1
                continue
            text, same = text_of(content), (source, hashlib.sha256(content).digest())
            if text is None or same in given:
                self.skipped["not UTF-8 text" if text is None else "the same again"] += 1
                continue
            given.add(same)
            self.num_read += 1
            self.num_bytes += len(content)
            self.sources.add(source)
            yield source, text


def _argument(metavar: str, help_text: str) -> Any:
    return typer.Argument(metavar=metavar, help=help_text)


recipes_app = typer.Typer(
    help="Recipe packs: what usually follows what.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_Out = Annotated[Path, option("OUT.json[.gz]", "for the pack", "--out", "-o")]
_Pack = Annotated[Path, _argument("PACK", "a pack, or base")]
_Tokenizer = Annotated[str, console.tokenizer_option("of the model")]


def _load_tokenizer(name: str) -> tuple[Encode, Callable[[Sequence[int]], list[str]]]:
    """Two functions: token ids of each text, and the text of each token id."""
    from ..simulate.tokenizers import load_tokenizer

    with refusing(named="--tokenizer: "):
        loaded = load_tokenizer(name)

    def texts(ids: Sequence[int]) -> list[str]:
        within = [token for token in ids if token < loaded.vocab_size]
        return [loaded.token_bytes(int(token)).decode("utf-8", "replace") for token in within]

    return lambda given: [loaded.encode(text) for text in given], texts


def _check_pack(out: Path, sources: Sequence[Path]) -> None:
    console.check_ending("--out", out, ".json", ".json.gz")
    console.check_outputs({"--out": out}, sources)


def _save(pack: RecipePack, out: Path) -> None:
    with refusing(out):
        pack.save(out)
    parts = []
    if pack.words or not pack.observed:
        parts += [f"{len(pack.words):,} words", f"{len(pack.recipes):,} recipes"]
    if pack.tokenizer:
        parts.append(f"{counted(len(pack.observed), 'entry', 'entries')} observed")
    typer.echo(f"wrote {out}: {', '.join(parts)}, {out.stat().st_size:,} bytes")


def _load(path: Path) -> RecipePack:
    from ...recipes.registry import find_pack

    with refusing(path):
        return find_pack(str(path))[1]


@recipes_app.command("learn", epilog=console.epilog("recipes learn"))
def learn_command(
    places: Annotated[
        list[Path], _argument("FILE_OR_FOLDER...", "texts to learn from; each place is one source")
    ],
    out: _Out,
    suffix: Annotated[
        list[str] | None, option(".py", "of folders, only files that end in this; repeatable")
    ] = None,
) -> None:
    """Learn a recipe pack from texts of your own: what usually follows what."""
    from .learn import learn

    _check_pack(out, places)
    with refusing():
        texts = SourceTexts(places, suffix or [])
    with console.progress_bar("learning from", len(texts.files)) as advance:
        pack = learn(texts.read(advance), "gpu-align recipes learn")
    read = f"{counted(texts.num_read, 'file')}, {counted(texts.num_bytes, 'byte')}"
    notes = [f"; {count:,} skipped: {why}" for why, count in sorted(texts.skipped.items())]
    typer.echo(f"read {read}, of {counted(len(texts.sources), 'source')}{''.join(notes)}")
    if not texts.num_read:
        refuse("expected texts to learn from, found none")
    if not pack.recipes:
        refuse("too little text: no word follows others often enough to make a recipe")
    _save(pack, out)


@recipes_app.command("observe", epilog=console.epilog("recipes observe"))
def observe_command(
    samples: Annotated[Path, _argument("SAMPLES.jsonl[.gz]", 'lines of {"task", "prompt", "samples"}')],
    out: _Out,
    tokenizer: _Tokenizer,
    trust_remote_code: console.TrustRemoteCode = False,
    agree: Annotated[float, option("SHARE", "of the samples of a prompt that must agree")] = 1.0,
    task: Annotated[str, option("NAME", "of the pack; else that of the samples")] = "",
) -> None:
    """Learn a recipe pack from samples of a model: what all answers to a prompt agree on."""
    from .learn import observe

    if not 0 < agree <= 1:
        refuse(f"--agree: expected 0 < share <= 1, found {agree}")
    _check_pack(out, [samples])
    groups = read_lines(samples, "samples")
    tokens = _load_tokenizer(tokenizer)
    with console.progress_bar("observing", len(groups)) as advance:
        made_by = "gpu-align recipes observe"
        pack = observe(groups, *tokens, agree=agree, task=task, made_by=made_by, progress=advance)
    count = sum(len(texts) for _, _, texts in groups)
    typer.echo(f"read {counted(len(groups), 'prompt')}, {counted(count, 'sample')}")
    if not pack.observed:
        typer.echo("note: the samples agree on nothing; the pack is empty", err=True)
    _save(pack, out)


@recipes_app.command("merge", epilog=console.epilog("recipes merge"))
def merge_command(
    parts: Annotated[list[Path], _argument("PACK...", "packs of one tokenizer, or of words")],
    out: _Out,
    without_texts: Annotated[
        bool, typer.Option("--shapes-only", help="leave out words and literal prefixes: a pack without texts")
    ] = False,
) -> None:
    """Merge packs into one."""
    from .merge import merge, shapes_only

    _check_pack(out, parts)
    loaded = [_load(path) for path in parts]
    with refusing(out):
        pack = merge(loaded)
    _save(shapes_only(pack) if without_texts else pack, out)


@recipes_app.command("report", epilog=console.epilog("recipes report"))
def report_command(
    pack: _Pack,
    outputs: Annotated[Path, _argument("OUTPUTS.jsonl[.gz]", 'lines of {"task", "prompt", "output"}')],
    tokenizer: _Tokenizer,
    trust_remote_code: console.TrustRemoteCode = False,
    json_out: console.JsonOut = None,
    num_draft_tokens: console.DraftTokens = 32,
) -> None:
    """Replay a model's outputs with a pack: coverage, accuracy and tokens a step, by task."""
    from .report import report

    console.check_outputs({"--json": json_out}, [pack, outputs])
    loaded = _load(pack)
    texts = read_lines(outputs, "output")
    tokens = _load_tokenizer(tokenizer)
    with refusing(pack, f"{pack}: "), console.progress_bar("replaying", len(texts)) as advance:
        found = report(loaded, texts, *tokens, num_draft_tokens, progress=advance)
    _print_report(found)
    about = {"version": __version__, "pack": loaded.content_hash, "tokenizer": tokenizer}
    console.write(json_out, lambda: {**about, **found.as_json()})


def _print_report(report: PackReport) -> None:
    header = ["task", "drafter", "tokens", "drafted", "accepted", "coverage", "accuracy", "tokens a step"]
    rows = [
        [name, drafter, f"{t.tokens:,}", f"{t.drafted:,}", f"{t.accepted:,}", f"{t.coverage:.1%}",
         "–" if t.accuracy is None else f"{t.accuracy:.2%}", f"{t.tokens_per_step:.2f}"]
        for name, alone in report.tasks.items()
        for drafter, t in (("recipes", alone), ("with context", report.with_context[name]))
    ]  # fmt: skip
    title = f"up to {report.num_draft_tokens} draft tokens a step"
    shown_by = console.print_table(title, header, rows, words=["task", "drafter"], folded="task")
    shown_by.print(
        "Drafted are verified tokens of recipes, up to a draft's first refuted one.",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


@recipes_app.command("show", epilog=console.epilog("recipes show"))
def show_command(
    pack: _Pack,
    top: Annotated[int, option("N", "entries to show", min=0)] = 20,
    tokenizer: Annotated[str | None, console.tokenizer_option("to show token ids as text")] = None,
    trust_remote_code: console.TrustRemoteCode = False,
) -> None:
    """Show what is in a pack: what it was made of, and its most frequent entries."""
    loaded = _load(pack)
    texts: Callable[[Sequence[int]], list[str]] = lambda ids: [f"#{token}" for token in ids]  # noqa: E731
    if tokenizer is not None:
        _, texts = _load_tokenizer(tokenizer)
    told = {"task": loaded.task, "made by": loaded.made_by, "content": loaded.content_hash}
    if loaded.tokenizer:
        told["tokenizer"] = loaded.tokenizer
    if loaded.words:
        told["words"] = f"{len(loaded.words):,}, {counted(len(loaded.recipes), 'recipe')}"
    if loaded.tokenizer:
        told["observed"] = f"{len(loaded.observed):,}"
        told["kept"] = f"{counted(len(loaded.kept), 'token')} stay themselves in shapes"
    for name, value in told.items():
        if value:
            typer.echo(f"{name:9}  {value}")
    header = ["key", "prefix", "then", "hits", "seen", "groups"]
    rows = [_shown(entry, texts) for entry in loaded.observed[:top]]
    by_seen = sorted(loaded.recipes, key=lambda recipe: (-recipe.seen, recipe.context))
    rows += [
        ["words", _visible("".join(r.context)), _visible(r.word), f"{r.hits:,}", f"{r.seen:,}", ""]
        for r in by_seen[: top - len(rows)]
    ]
    if rows:
        console.print_table("", header, rows, words=["key", "prefix", "then"], folded="prefix")


def _shown(entry: Observed, texts: Callable[[Sequence[int]], list[str]]) -> list[str]:
    from ...ops import recipes as numbers

    names = ("IDENTIFIER", "NUMBER", "SPACE", "STRING", "START")
    classes = {getattr(numbers, f"SHAPE_{name}"): f"‹{name.lower()}›" for name in names}

    def one(item: int) -> str:
        if item < 0:
            return classes.get(item, "(nothing)")
        return _visible("".join(texts([item])) or f"#{item}")

    counts = [f"{number:,}" for number in (entry.hits, entry.seen, entry.groups)]
    prefix = " ".join(map(one, entry.context))
    return ["shape" if entry.is_shape else "literal", prefix, one(entry.token), *counts]


def _visible(text: str) -> str:
    """The text in one line, with spaces that show."""
    return repr(text)[1:-1].replace(" ", "␣")
