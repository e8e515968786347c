"""What ``gpu-align simulate`` does with its options: read, replay, write, print."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import typer

from ...config import DrafterConfig
from .. import policies as published
from ..console import check_outputs, counted, print_table, progress_bar, refuse
from ..inputs import RecordError
from . import policies
from .records import Record, read_records, records_of_files, records_of_git
from .replay import simulate
from .report import TABLE_HEADER, table_rows, to_html, to_json
from .tokenizers import load_tokenizer

#: The tokenizer of texts where none is named: it needs no network.
_DEFAULT_TOKENIZER = "tekken"


class Input(NamedTuple):
    """Where records come from: a file, two texts, or a repository's history."""

    pairs: Path | None
    before: Path | None
    after: Path | None
    git: str | None
    repo: Path | None
    suffixes: Sequence[str]
    limit: int | None


class Outputs(NamedTuple):
    json: Path | None
    html: Path | None


def run(
    given: Input,
    names: Sequence[str],
    num_draft_tokens: int,
    draft_in_prefill: bool,
    settings: Mapping[str, Sequence[float] | None],
    sweep: bool,
    recipes: str,
    tokenizer: str | None,
    outputs: Outputs,
) -> None:
    """The command; refuses bad input before the replay starts."""
    chosen = list(dict.fromkeys(names))
    paths = [name for name in chosen if ":" in name]
    if unknown := [name for name in chosen if name not in (*policies.policy_names(), *paths)]:
        known = ", ".join(policies.policy_names())
        refuse(f"--policy: expected one of {known}, or module:Class, found {unknown[0]!r}")
    if paths and "" not in sys.path:
        sys.path.insert(0, "")  # as for `python -m`: a module of one's own is usually in this folder
    combined = _settings(settings, sweep)
    _check_input(given)
    sources = [path for path in (given.pairs, given.before, given.after) if path is not None]
    check_outputs({"--json": outputs.json, "--html": outputs.html}, sources)
    records = _records(given, tokenizer)
    chosen = _runnable(recipes, records, chosen)
    try:
        drafters = policies.make_policies(chosen, records, num_draft_tokens, combined, recipes)
    except OSError as error:
        refuse(f"--recipes: {recipes}: {error.strerror or error}")
    except ValueError as error:
        refuse(str(error))
    total = sum(len(record.output) for record in records) * len(drafters)
    with progress_bar("replaying", total) as advance:
        results = simulate(records, drafters, num_draft_tokens, draft_in_prefill, advance)

    if outputs.json is not None:
        records_of = f"{given.before} to {given.after}" if given.git is None else f"git {given.git}"
        about = {
            "records": records_of if given.pairs is None else str(given.pairs),
            "tokenizer": policies.tokenizer_of(records),
            "settings": {
                "draft_in_prefill": draft_in_prefill,
                "recipes": recipes,
                "drafter": [asdict(DrafterConfig(**setting)) for setting in combined],
            },
        }
        found = to_json(results, num_draft_tokens, about)
        outputs.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if outputs.html is not None:
        outputs.html.write_text(to_html(records, results, num_draft_tokens), encoding="utf-8")
    title = f"up to {num_draft_tokens} draft tokens a step"
    print_table(title, TABLE_HEADER, table_rows(results), words=["policy"], folded="policy")
    for written in outputs:
        if written is not None:
            typer.echo(f"wrote {written}")


def _check_input(given: Input) -> None:
    if (given.before is None) != (given.after is None):
        missing, there = ("--after", "--before") if given.after is None else ("--before", "--after")
        refuse(f"{there}: expected {missing} as well")
    ways = {"PAIRS": given.pairs, "--before and --after": given.before, "--git": given.git}
    found = [name for name, value in ways.items() if value is not None]
    if len(found) != 1:
        told = " and ".join(found) or "none"
        refuse(f"expected one of a file PAIRS, --before with --after, and --git, found {told}")
    if given.git is None:
        only = {"--repo": given.repo, "--suffix": given.suffixes or None, "--limit": given.limit}
        for option, value in only.items():
            if value is not None:
                refuse(f"{option}: expected with --git only")


def _records(given: Input, tokenizer: str | None) -> list[Record]:
    try:
        if given.pairs is not None:
            records = read_records(given.pairs, tokenizer)
            if tokenizer is not None:
                load_tokenizer(tokenizer)  # records with ids alone have not needed it yet
            return records
        with_name = tokenizer or _DEFAULT_TOKENIZER
        if given.before is not None and given.after is not None:
            records = records_of_files(given.before, given.after, with_name)
        else:
            records = records_of_git(
                given.git or "", given.repo or Path(), with_name, given.suffixes, given.limit
            )
            typer.echo(f"note: {counted(len(records), 'edit')} of {given.git}", err=True)
        if tokenizer is None:
            note = f"note: tokenized with {_DEFAULT_TOKENIZER}; --tokenizer takes that of your model"
            typer.echo(note, err=True)
        return records
    except RecordError as error:
        refuse(f"{given.pairs}: {error}" if error.line else str(error))
    except ValueError as error:
        refuse(str(error))
    except OSError as error:
        path = given.pairs if given.pairs is not None else error.filename
        refuse(f"{path}: {error.strerror or error}" if path else str(error))


def _runnable(pack: str, records: Sequence[Record], names: list[str]) -> list[str]:
    """The policies to run: `names`, or else all that can run with this pack."""
    known = policies.tokenizer_of(records) is not None
    names = names or policies.runnable_policy_names(with_recipes=known and pack != policies.NO_PACK)
    if not known and pack != policies.NO_PACK:
        why = "the records do not all name one tokenizer, and --tokenizer gives none"
        if pack != policies.SHIPPED_PACK:
            refuse(f"--recipes: {why}")
        if policies.OURS in names:
            typer.echo(f"note: {policies.OURS} runs without recipes: {why}", err=True)
    return names


def _settings(given: Mapping[str, Sequence[float] | None], sweep: bool) -> list[dict[str, Any]]:
    """The settings of our drafter to run: every combination of the given values, or the default alone."""
    fields: list[list[tuple[str, Any]]] = [
        [(name, int(value) if value.is_integer() else value) for value in dict.fromkeys(map(float, values))]
        for name, values in given.items()
        if values
    ]
    settings = [dict(combination) for combination in itertools.product(*fields)]
    settings += [setting for setting in policies.SWEEP if sweep and setting not in settings]
    for setting in settings:
        try:
            DrafterConfig(**setting)
        except ValueError as error:
            field, _, message = str(error).partition(":")
            refuse(f"--{field.replace('_', '-')}:{message}")
    return settings


#: Arguments that are not options on a command line.
_NOT_OPTIONS = ("name", "recipes", "earlier", "ends_line")


class PolicyInfo(NamedTuple):
    """One drafter: what it does, in a line; its options as it runs; how others are given; who published it.

    needs: what it cannot run without here; empty where nothing is missing.
    """

    name: str
    summary: str
    options: dict[str, Any]
    given_as: str
    source: str
    needs: str


def describe() -> list[PolicyInfo]:
    """Every policy, in the order of ``simulate``."""
    fields = "length_factor", "min_survival", "min_survival_recipe"
    ours = PolicyInfo(
        name=policies.OURS,
        summary="This library's drafter: aligns the prediction, looks the context and recipes up.",
        options={field: getattr(DrafterConfig(), field) for field in fields},
        given_as="--length-factor F --min-survival P --min-survival-recipe P --recipes PATH|base|off",
        source="this library, docs/alignment.md",
        needs="",
    )
    groups: tuple[Mapping[str, Callable[..., Any]], ...] = (
        published.POLICIES, published.RECIPE_POLICIES, published.OPTIONAL_POLICIES,
    )  # fmt: skip
    return [ours, *(_published(name, factory) for group in groups for name, factory in group.items())]


def _published(name: str, factory: Callable[..., Any]) -> PolicyInfo:
    """By its signature, and by the first paragraph and the source of its docstring."""
    function, args, keywords = factory, (), {}
    if isinstance(factory, functools.partial):
        function, args, keywords = factory.func, factory.args, factory.keywords
    bound = inspect.signature(function).bind_partial(*args, **keywords)
    bound.apply_defaults()
    options = {
        option: value
        for option, value in bound.arguments.items()
        if option not in _NOT_OPTIONS and not isinstance(value, tuple)
    }
    given = [f"--policy 'gpu_align.policies:{function.__name__}?{o}={v}'" for o, v in options.items()]
    text = (inspect.getdoc(function) or "").replace("``", "`")
    source = re.search(r"\bSource:\s+(.+?)(?:\n\n|\Z)", text, re.DOTALL)
    needs = "--tokenizer, or records that name one" if name in published.RECIPE_POLICIES else ""
    if name in published.OPTIONAL_POLICIES and not published.suffix_decoding_available():
        needs = "arctic-inference"
    return PolicyInfo(
        name=name,
        summary=" ".join(text.partition("\n\n")[0].split()),
        options=options,
        given_as=given[0] if given else "",
        source=" ".join(source[1].split()) if source else "",
        needs=needs,
    )


def lines_of(info: PolicyInfo) -> list[str]:
    """One policy in full, as lines of text."""
    options = ", ".join(f"{name}={value!r}" for name, value in info.options.items())
    told = {
        "options": options or "none",
        "given as": info.given_as,
        "source": info.source,
        "needs": info.needs,
    }
    lines = [f"  {what:9} {value}" for what, value in told.items() if value]
    return [info.name, f"  {info.summary}", *lines]
