"""``gpu-align simulate``: read, replay, write, print; and ``gpu-align policies``, what it can run."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ... import __version__
from .. import console
from ..console import counted, option, refuse, refusing

if TYPE_CHECKING:
    from .records import Record

#: The tokenizer of texts where none is named: it needs no network.
_DEFAULT_TOKENIZER = "tekken"


def _setting(metavar: str) -> Any:
    return option(metavar, "a setting of gpu_align; repeatable: each is run")


def simulate_command(
    pairs: Annotated[
        Path | None, typer.Argument(metavar="PAIRS.jsonl", help="records to replay, plain or gzipped")
    ] = None,
    before: console.Before = None,
    after: console.After = None,
    git: console.Git = None,
    repo: console.Repo = None,
    suffix: Annotated[
        list[str] | None, option(".py", "of --git, only files that end in this; repeatable")
    ] = None,
    limit: Annotated[int | None, console.limit_option(100)] = None,
    policy: Annotated[
        list[str] | None,
        option(
            "NAME|MODULE:CLASS",
            "a drafter to run (gpu-align policies), or a predictor of your own; repeatable; "
            "all if none is given",
        ),
    ] = None,
    num_draft_tokens: console.DraftTokens = 32,
    draft_in_prefill: Annotated[
        bool, typer.Option("--draft-in-prefill", help="let the prefill step verify drafts too")
    ] = False,
    length_factor: Annotated[list[float] | None, _setting("F")] = None,
    min_survival: Annotated[list[float] | None, _setting("P")] = None,
    min_survival_recipe: Annotated[list[float] | None, _setting("P")] = None,
    recipes: Annotated[
        str,
        option(
            "PATH|base|off", "a recipe pack for gpu_align and recipe_pack; base is the one that comes with it"
        ),
    ] = "base",
    sweep: Annotated[
        bool, typer.Option("--sweep", help="run gpu_align all along its trade-off, beside its default")
    ] = False,
    tokenizer: Annotated[
        str | None, console.tokenizer_option("for records with text, and to show ids as text")
    ] = None,
    trust_remote_code: console.TrustRemoteCode = False,
    views: Annotated[
        bool,
        typer.Option(
            "--views",
            help="of records with text, draft from the prediction as JSON and as a diff, too; "
            "without one, from the texts in the prompt",
        ),
    ] = False,
    json_out: console.JsonOut = None,
    html_out: console.HtmlOut = None,
) -> None:
    """Replay known outputs and count the verification steps that each drafter takes.

    Give a file of records, or two texts (--before, --after), or commits of a repository (--git).
    """
    from ...drafter.config import DrafterConfig
    from . import policies, replay

    chosen = list(dict.fromkeys(policy or ()))
    known = policies.policy_names()
    if unknown := [name for name in chosen if ":" not in name and name not in known]:
        refuse(f"--policy: expected {policies.nearest_to(unknown[0])}, or module:Class, found {unknown[0]!r}")
    if any(":" in name for name in chosen) and "" not in sys.path:
        sys.path.insert(0, "")  # as for `python -m`: a module of one's own is usually in this folder
    given = {
        "length_factor": length_factor,
        "min_survival": min_survival,
        "min_survival_recipe": min_survival_recipe,
    }
    settings = _settings(given, policies.SWEEP if sweep else ())
    of_git: dict[str, object] = {"--repo": repo, "--suffix": suffix or None, "--limit": limit}
    console.refuse_others(
        {"a file PAIRS": pairs, "--before": before, "--git": git},
        {"--after": (after, "--before"), "--views": (views or None, "a file PAIRS")}
        | {name: (value, "--git") for name, value in of_git.items()},
    )
    if pairs is None and before is None and git is None:
        refuse("expected one of a file PAIRS, --before with --after, and --git, found none")
    if before is not None and after is None:
        refuse("--before: expected --after as well")
    inputs = [path for path in (pairs, before, after) if path is not None]
    console.check_outputs({"--json": json_out, "--html": html_out}, inputs)

    records = _records(
        pairs, before, after, (git or "", repo or Path(), suffix or [], limit), tokenizer, views
    )
    chosen = _runnable(recipes, records, chosen)
    with refusing(Path(recipes)):
        drafters = policies.make_policies(chosen, records, num_draft_tokens, settings, recipes)
    total = sum(len(record.output) for record in records) * len(drafters)
    with console.progress_bar("replaying", total) as advance:
        results = replay.simulate(records, drafters, num_draft_tokens, draft_in_prefill, advance)

    about = {
        "records": str(pairs or (f"{before} to {after}" if git is None else f"git {git}")),
        "tokenizer": policies.tokenizer_of(records),
        "settings": {
            "draft_in_prefill": draft_in_prefill,
            "views": views,
            "recipes": recipes,
            "drafter": [asdict(DrafterConfig(**setting)) for setting in settings],
        },
    }
    console.write(json_out, lambda: replay.to_json(results, num_draft_tokens, about))
    console.write(html_out, lambda: replay.to_html(records, results, num_draft_tokens))
    title = f"up to {num_draft_tokens} draft tokens a step"
    console.print_table(
        title, replay.TABLE_HEADER, replay.table_rows(results), words=["policy"], folded="policy"
    )
    typer.echo(replay.verdict(results))


def _records(
    pairs: Path | None,
    before: Path | None,
    after: Path | None,
    history: tuple[str, Path, Sequence[str], int | None],
    tokenizer: str | None,
    views: bool,
) -> list[Record]:
    """The records to replay; history: range, repository, suffixes and limit."""
    from .records import read_records, records_of_files, records_of_git
    from .tokenizers import load_tokenizer

    name = tokenizer or _DEFAULT_TOKENIZER
    if pairs is not None:
        with refusing(pairs, f"{pairs}: "):
            records = read_records(pairs, tokenizer, views)
    with refusing():
        if pairs is not None:
            if tokenizer is not None:
                load_tokenizer(tokenizer)  # records with ids alone have not needed it yet
            return records
        if before is not None and after is not None:
            records = records_of_files(before, after, name)
        else:
            revisions, repo, suffixes, limit = history
            records = records_of_git(revisions, repo, name, suffixes, limit)
            typer.echo(f"note: {counted(len(records), 'edit')} of {revisions}", err=True)
        if tokenizer is None:
            typer.echo(f"note: tokenized with {name}; --tokenizer takes that of your model", err=True)
        return records


def _runnable(pack: str, records: Sequence[Record], names: list[str]) -> list[str]:
    """The policies to run: `names`, or else all that can run with this pack."""
    from . import policies

    known = policies.tokenizer_of(records) is not None
    names = names or policies.runnable_policy_names(with_recipes=known and pack != policies.NO_PACK)
    if not known and pack != policies.NO_PACK:
        why = "the records do not all name one tokenizer, and --tokenizer gives none"
        if pack != policies.SHIPPED_PACK:
            refuse(f"--recipes: {why}")
        if policies.OURS in names:
            typer.echo(f"note: {policies.OURS} runs without recipes: {why}", err=True)
    return names


def _settings(
    given: Mapping[str, Sequence[float] | None], sweep: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The settings of our drafter to run: every combination of the given values, or the default alone; `sweep`."""
    from ...drafter.config import DrafterConfig

    fields: list[list[tuple[str, Any]]] = [
        [(name, int(value) if value.is_integer() else value) for value in dict.fromkeys(values)]
        for name, values in given.items()
        if values
    ]
    settings = [dict(combination) for combination in itertools.product(*fields)]
    settings += [setting for setting in sweep if setting not in settings]
    for setting in settings:
        try:
            DrafterConfig(**setting)
        except ValueError as error:
            field, _, message = str(error).partition(":")
            refuse(f"--{field.replace('_', '-')}:{message}")
    return settings


def policies_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="only these")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print all fields as JSON")] = False,
) -> None:
    """List the drafters that simulate can run: what each does, and who published it."""
    found = {policy["name"]: policy for policy in describe()}
    for name in names or ():
        if name not in found:
            refuse(f"NAME: expected one of {', '.join(found)}, found {name!r}")
    chosen = [found[name] for name in dict.fromkeys(names or found)]
    if as_json:
        typer.echo(json.dumps({"version": __version__, "policies": chosen}, indent=1))
        return
    for policy in chosen:
        typer.echo(f"{policy['name']}\n  {policy['summary']}")
        for what in ("source", "needs"):
            if policy[what]:
                typer.echo(f"  {what:6} {policy[what]}")


def describe() -> list[dict[str, str]]:
    """Every policy, in the order of ``simulate``: ``name``; ``summary`` and ``source``, who published it, of its
    docstring; ``needs``, what it cannot run without here."""
    from .. import policies as published
    from . import policies

    told = "This library's drafter: aligns the prediction, looks the context and recipes up."
    described = [{"name": policies.OURS, "summary": told, "source": "docs/alignment.md", "needs": ""}]
    for group, needs in (
        (published.POLICIES, ""),
        (published.RECIPE_POLICIES, "--tokenizer, or records that name one"),
        (published.OPTIONAL_POLICIES, "" if published.suffix_decoding_available() else "arctic-inference"),
    ):
        for name, factory in group.items():
            made = factory.func if isinstance(factory, functools.partial) else factory
            text = (inspect.getdoc(made) or "").replace("``", "`")
            source = re.search(r"\bSource:\s+(.+?)(?:\n\n|\Z)", text, re.DOTALL)
            described.append(
                {
                    "name": name,
                    "summary": " ".join(text.partition("\n\n")[0].split()),
                    "source": " ".join(source[1].split()) if source else "",
                    "needs": needs,
                }
            )
    return described
