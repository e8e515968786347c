"""``gpu-align recipes``: learn a pack, merge packs, see what one is worth and what is in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from gpu_align import __version__
from gpu_align.cli.console import (
    check_outputs,
    counted,
    print_table,
    progress_bar,
    refuse,
    tokenizer_option,
)
from gpu_align.cli.examples import epilog
from gpu_align.cli.samples import read_outputs, read_samples
from gpu_align.cli.texts import find_texts

if TYPE_CHECKING:
    from gpu_align import RecipePack
    from gpu_align.recipes import Observed, Report

recipes_app = typer.Typer(
    help="Recipe packs: what usually follows what.", no_args_is_help=True, pretty_exceptions_enable=False
)
_ENDINGS = (".json", ".json.gz")
#: Of a pack: the one that comes with the library.
_SHIPPED = "base"


class _Tokens(NamedTuple):
    """A tokenizer as packs take it."""

    encode: Callable[[list[str]], Sequence[Sequence[int]]]
    texts: Callable[[Sequence[int]], list[str]]


def _load_tokenizer(name: str) -> _Tokens:
    from gpu_align import simulate

    try:
        loaded = simulate.load_tokenizer(name)
    except (OSError, ValueError) as error:
        refuse(f"--tokenizer: {error}")

    def texts(ids: Sequence[int]) -> list[str]:
        within = [token for token in ids if token < loaded.vocab_size]
        return [loaded.token_bytes(int(token)).decode("utf-8", "replace") for token in within]

    return _Tokens(lambda given: [loaded.encode(text) for text in given], texts)


def _check_pack(option: str, out: Path, sources: Sequence[Path]) -> None:
    if not out.name.endswith(_ENDINGS):
        # Two files in the wrong order would otherwise cost one of them.
        refuse(f"expected a name that ends in .json or .json.gz for the pack, found {out}")
    check_outputs({option: out}, sources)


def _save(pack: RecipePack, out: Path) -> None:
    try:
        pack.save(out)
    except OSError as error:
        refuse(f"{out}: {error.strerror or error}")
    parts = []
    if pack.words or not pack.observed:
        parts += [f"{len(pack.words):,} words", f"{len(pack.recipes):,} recipes"]
    if pack.tokenizer:
        parts.append(f"{counted(len(pack.observed), 'entry', 'entries')} observed")
    typer.echo(f"wrote {out}: {', '.join(parts)}, {out.stat().st_size:,} bytes")


def _load(path: Path) -> RecipePack:
    from gpu_align.recipes import PackError, RecipePack

    try:
        return RecipePack.load(None if str(path) == _SHIPPED else path)
    except OSError as error:
        refuse(f"{path}: {error.strerror or error}")
    except PackError as error:
        refuse(str(error))


@recipes_app.command("learn", epilog=epilog("recipes learn"))
def learn_command(
    out: Annotated[Path, typer.Argument(metavar="OUT.json[.gz]", help="for the pack")],
    places: Annotated[
        list[Path],
        typer.Argument(metavar="FILE_OR_FOLDER...", help="texts to learn from; each place is one source"),
    ],
    suffix: Annotated[
        list[str] | None,
        typer.Option(metavar=".py", help="of folders, only files that end in this; repeatable"),
    ] = None,
) -> None:
    """Learn a recipe pack from texts of your own: what usually follows what."""
    from gpu_align.recipes import RecipePack

    _check_pack("OUT", out, places)
    try:
        texts = find_texts(places, suffix or [])
    except FileNotFoundError as error:
        refuse(str(error))

    with progress_bar("learning from", len(texts.files)) as advance:
        pack = RecipePack.learn(texts.read(advance), made_by="gpu-align recipes learn")
    read = f"{counted(texts.num_read, 'file')}, {counted(texts.num_bytes, 'byte')}"
    notes = [f"; {count:,} skipped: {why}" for why, count in texts.skipped.items() if count]
    typer.echo(f"read {read}, of {counted(len(texts.sources), 'source')}{''.join(notes)}")
    if not texts.num_read:
        refuse("expected texts to learn from, found none")
    if not pack.recipes:
        refuse("too little text: no word follows others often enough to make a recipe")
    _save(pack.calibrated(RecipePack.load().calibration), out)


@recipes_app.command("observe", epilog=epilog("recipes observe"))
def observe_command(
    samples: Annotated[
        Path, typer.Argument(metavar="SAMPLES.jsonl[.gz]", help='lines of {"task", "prompt", "samples"}')
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT.json[.gz]", help="for the pack")],
    tokenizer: Annotated[str, tokenizer_option("of the model")],
    agree: Annotated[
        float, typer.Option(metavar="SHARE", help="of the samples of a prompt that must agree")
    ] = 1.0,
    task: Annotated[str, typer.Option(metavar="NAME", help="of the pack; else that of the samples")] = "",
) -> None:
    """Learn a recipe pack from samples of a model: what all answers to a prompt agree on."""
    from gpu_align.recipes import RecipePack

    if not 0 < agree <= 1:
        refuse(f"--agree: expected 0 < share <= 1, found {agree}")
    _check_pack("--out", out, [samples])
    groups = list(_read(samples, read_samples))
    tokens = _load_tokenizer(tokenizer)
    with progress_bar("observing", len(groups)) as advance:
        pack = RecipePack.observe(
            groups,
            tokens.encode,
            tokens.texts,
            agree=agree,
            task=task,
            made_by="gpu-align recipes observe",
            progress=advance,
        )
    count = sum(len(texts) for _, _, texts in groups)
    typer.echo(f"read {counted(len(groups), 'prompt')}, {counted(count, 'sample')}")
    if not pack.observed:
        typer.echo("note: the samples agree on nothing; the pack is empty", err=True)
    _save(pack, out)


@recipes_app.command("merge", epilog=epilog("recipes merge"))
def merge_command(
    parts: Annotated[
        list[Path], typer.Argument(metavar="PACK_OR_MISSES...", help="files; one a pack at least")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT.json[.gz]", help="for the pack")],
    shapes_only: Annotated[
        bool, typer.Option("--shapes-only", help="leave out words and literal prefixes: a pack without texts")
    ] = False,
) -> None:
    """Merge packs, and the misses that servers counted, into one pack."""
    from gpu_align.recipes import Misses, PackError, RecipePack
    from gpu_align.recipes.content import Content
    from gpu_align.recipes.files import read_either

    _check_pack("--out", out, parts)
    packs, misses = [], []
    for path in parts:
        try:
            content = read_either(path)
        except OSError as error:
            refuse(f"{path}: {error.strerror or error}")
        except PackError as error:
            refuse(str(error))
        if isinstance(content, Content):
            packs.append(RecipePack(*content))
        else:
            misses.append(Misses.of(content))
    if not packs:
        refuse("expected a pack among the files, found misses alone")
    try:
        pack = packs[0].merge(*packs[1:], *misses)
    except PackError as error:
        refuse(str(error))
    _save(pack.shapes_only() if shapes_only else pack, out)


@recipes_app.command("report", epilog=epilog("recipes report"))
def report_command(
    pack: Annotated[Path, typer.Argument(metavar="PACK", help="a pack, or base")],
    outputs: Annotated[
        Path, typer.Argument(metavar="OUTPUTS.jsonl[.gz]", help='lines of {"task", "prompt", "output"}')
    ],
    tokenizer: Annotated[str, tokenizer_option("of the model")],
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="write the figures as JSON")
    ] = None,
    misses_out: Annotated[
        Path | None, typer.Option("--misses", metavar="OUT", help="write what was refuted, for merge")
    ] = None,
    num_draft_tokens: Annotated[
        int,
        typer.Option(
            "--num-draft-tokens", "-k", min=1, max=256, metavar="K", help="most draft tokens a step, 1 to 256"
        ),
    ] = 16,
) -> None:
    """Replay a model's outputs with a pack: coverage, accuracy and tokens a step, by task."""
    from gpu_align.recipes import Misses, PackError

    check_outputs({"--json": json_out, "--misses": misses_out}, [pack, outputs])
    loaded = _load(pack)
    texts = list(_read(outputs, read_outputs))
    tokens = _load_tokenizer(tokenizer)
    misses = Misses(loaded.tokenizer, made_by="gpu-align recipes report")
    try:
        with progress_bar("replaying", len(texts)) as advance:
            found = loaded.report(
                texts, tokens.encode, tokens.texts, num_draft_tokens, misses=misses, progress=advance
            )
    except PackError as error:
        refuse(f"{pack}: {error}")
    _print_report(found)
    if json_out is not None:
        about = {"version": __version__, "pack": loaded.content_hash, "tokenizer": tokenizer}
        json_out.write_text(json.dumps({**about, **found.as_json()}, indent=2) + "\n", encoding="utf-8")
    if misses_out is not None:
        misses.save(misses_out)
    for written in (json_out, misses_out):
        if written is not None:
            typer.echo(f"wrote {written}")


def _print_report(report: Report) -> None:
    from gpu_align.recipes.report import PUBLISHED, PUBLISHED_ACCURACY, PUBLISHED_COVERAGE

    header = ["task", "drafter", "tokens", "drafted", "accepted", "coverage", "accuracy", "tokens a step"]
    rows = [
        [name, drafter, f"{t.tokens:,}", f"{t.drafted:,}", f"{t.accepted:,}", f"{t.coverage:.1%}",
         f"{t.accuracy:.2%}", f"{t.tokens_per_step:.2f}"]
        for name, alone in report.tasks.items()
        for drafter, t in (("recipes", alone), ("with context", report.with_context[name]))
    ]  # fmt: skip
    coverage = "–".join(f"{share:.0%}" for share in PUBLISHED_COVERAGE)
    accuracy = "–".join(f"{share:.1%}" for share in PUBLISHED_ACCURACY)
    rows += [
        [name, "published", "", "", "", coverage, accuracy, f"{rate:.1f}"] for name, rate in PUBLISHED.items()
    ]
    title = f"up to {report.num_draft_tokens} draft tokens a step"
    console = print_table(title, header, rows, words=["task", "drafter"], folded="task")
    console.print(
        "Drafted are recipe tokens that were verified, up to the first one of a draft that was refuted.",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


@recipes_app.command("show", epilog=epilog("recipes show"))
def show_command(
    pack: Annotated[Path, typer.Argument(metavar="PACK", help="a pack, or base")],
    top: Annotated[int, typer.Option(min=0, metavar="N", help="entries to show")] = 20,
    tokenizer: Annotated[str | None, tokenizer_option("to show token ids as text")] = None,
) -> None:
    """Show what is in a pack: what it was made of, and its most frequent entries."""
    loaded = _load(pack)
    texts: Callable[[Sequence[int]], list[str]] = lambda ids: [f"#{token}" for token in ids]  # noqa: E731
    if tokenizer is not None:
        texts = _load_tokenizer(tokenizer).texts
    told = {
        "task": loaded.task,
        "made by": loaded.made_by,
        "content": loaded.content_hash,
        "tokenizer": loaded.tokenizer,
        "words": f"{len(loaded.words):,}, {counted(len(loaded.recipes), 'recipe')}" if loaded.words else "",
        "observed": f"{len(loaded.observed):,}" if loaded.tokenizer else "",
        "kept": f"{counted(len(loaded.kept), 'token')} stay themselves in shapes" if loaded.tokenizer else "",
    }
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
        print_table("", header, rows, words=["key", "prefix", "then"], folded="prefix")


def _shown(entry: Observed, texts: Callable[[Sequence[int]], list[str]]) -> list[str]:
    from gpu_align.ops import constants

    classes = {
        constants.SHAPE_IDENTIFIER: "‹identifier›",
        constants.SHAPE_NUMBER: "‹number›",
        constants.SHAPE_SPACE: "‹space›",
        constants.SHAPE_STRING: "‹string›",
        constants.SHAPE_START: "‹start›",
    }

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


@recipes_app.command("index", epilog=epilog("recipes index"))
def index_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder of packs")],
) -> None:
    """Write the index of a folder of packs, from which a server takes them by name and version."""
    from gpu_align.recipes import PackError
    from gpu_align.recipes.registry import INDEX, Registry

    try:
        registry = Registry(folder)
        wrong = registry.update()
    except OSError as error:
        refuse(f"{folder}: {error.strerror or error}")
    except PackError as error:
        refuse(str(error))
    for _, why in wrong:
        typer.echo(f"warning: {why}", err=True)
    for pack in registry.packs:
        typer.echo(f"{pack.task}@{pack.version}  {pack.file}  {pack.content_hash}")
    typer.echo(f"wrote {folder / INDEX}: {counted(len(registry.packs), 'pack')}")


def _read(path: Path, read: Callable[[Path], Iterator[Any]]) -> Iterator[Any]:
    try:
        found = list(read(path))
    except OSError as error:
        refuse(f"{path}: {error.strerror or error}")
    except ValueError as error:
        refuse(f"{path}: {error}")
    if not found:
        refuse(f"{path}: expected lines of JSON, found none")
    return iter(found)
