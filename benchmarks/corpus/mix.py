"""The parts of the corpus beside files of real releases: made edits, documents of state, and other tokenizers.

A state is what an agent rewrites when one thing in its world has changed: a list of records with nested fields,
printed as JSON or YAML. The next version changes a few values, appends an item or two, now and then removes one:
everything else is as it was, in the same order.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import yaml
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from benchmarks.corpus.edits import EDITS
from benchmarks.corpus.files import Edit, hash_of
from gpu_align.tools.simulate.replay import load_tokenizer

#: Of the corpus's own BPE.
VOCAB_SIZE = 8_192
#: Text → token ids.
Encode = Callable[[str], list[int]]


def encoder_of(tokens: str, training: Sequence[str]) -> Encode:
    """The encoder of a name of tokens: "bytes" of UTF-8, a "bpe" of the texts `training`, or a tokenizer."""
    if tokens == "bytes":
        return lambda text: list(text.encode())
    if tokens != "bpe":
        return load_tokenizer(tokens).encode
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    # Ties are broken by token id: the same texts give the same merges.
    tokenizer.train_from_iterator(sorted(training), trainer)
    return lambda text: list(tokenizer.encode(text).ids)


#: Records a kind of edit and split.
NUM_MADE = {"tune": 36, "test": 15}
NUM_STATES = {"tune": 24, "test": 12}
#: One in so many real files is tokenized again by each other tokenizer.
ONE_IN = 8
#: Longest text that is edited here, and that is written in bytes; Tekken tokens.
MAX_EDITED, MAX_RETOKENIZED = 4_000, 1_800
#: How many of a kind's edits are on which sort of text, in turn.
_TURNS = ("python", "document", "python", "json", "config", "python", "sql", "document")


def synthetic_pairs(texts: Sequence[Edit], split: str) -> list[Edit]:
    """Edits of every kind on texts of this split; donors are of the same sort and split."""
    made: list[Edit] = []
    fitting = [text for text in texts if text.num_tokens <= MAX_EDITED]
    for kind, edit in [*EDITS.items(), ("unrelated", None)]:
        turns = {
            sort: sorted((t for t in fitting if t.text == sort), key=lambda t: hash_of(kind, t.id))
            for sort in dict.fromkeys(_TURNS)
        }
        donors = {sort: found[::-1] for sort, found in turns.items()}
        count, sorts = 0, cycle(_TURNS)
        while count < NUM_MADE[split] and any(turns.values()):
            sort = next(sorts)
            if not turns[sort]:
                continue
            text = turns[sort].pop()
            rng = random.Random(hash_of(kind, text.id))
            # Another package's text where there is one, else another text.
            elsewhere = [d for d in donors[sort] if d.package != text.package]
            elsewhere = elsewhere or [d for d in donors[sort] if d.id != text.id]
            if not elsewhere:
                continue
            donor = rng.choice(elsewhere)
            before, after = donor.after, text.after
            if edit is not None:
                before, after = text.after, edit(text.after, donor.after, rng)
            if after is not None:
                made.append(Edit(f"{kind}/{text.id}", kind, sort, text.package, before, after))
                count += 1
    for number in range(NUM_STATES[split]):
        form = ("json", "yaml", "json_compact")[number % 3]
        rng = random.Random(hash_of("state", split, str(number)))
        state = _state(rng)
        pair = _write(form, state), _write(form, _update(state, rng))
        sort = "config" if form == "yaml" else "json"
        made.append(Edit(f"state/{split}/{number:02}.{form}", "state", sort, "", *pair))
    return made


def other_tokens(texts: Sequence[Edit], training: Sequence[str]) -> Iterator[tuple[str, Encode, list[Edit]]]:
    """``(name, encode, edits)`` of each further tokenizer: a BPE trained on `training`, and bytes."""
    short = [text for text in texts if text.num_tokens <= MAX_RETOKENIZED]
    for name in ("bpe", "bytes"):
        yield name, encoder_of(name, training), [t for t in short if hash_of(name, t.id) % ONE_IN == 0]


_NAMES = [
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "jetty", "knoll",
    "lagoon", "meadow", "north", "oasis", "prairie",
]  # fmt: skip
_STATUS = ("queued", "running", "blocked", "in_review", "done", "failed", "cancelled")
_VERBS = [
    "collect", "verify", "index", "publish", "migrate", "archive", "compress", "translate", "reconcile",
    "summarise", "annotate", "deploy",
]  # fmt: skip
_THINGS = [
    "invoices", "thumbnails", "customers", "backups", "metrics", "sessions", "manifests", "shipments",
    "contracts", "snapshots",
]  # fmt: skip


def _state(rng: random.Random) -> dict[str, Any]:
    return {
        "version": rng.randint(3, 400),
        "updated_at": _time(rng),
        "owner": rng.choice(_NAMES),
        "settings": {
            "retries": rng.randint(0, 8),
            "timeout_s": rng.choice((10, 30, 60, 120)),
            "regions": rng.sample(_NAMES, 3),
            "dry_run": rng.random() < 0.3,
        },
        "tasks": [_task(i, rng) for i in range(rng.randint(8, 28))],
    }


def _task(number: int, rng: random.Random) -> dict[str, Any]:
    task: dict[str, Any] = {
        "id": f"task-{1000 + number * 7 + rng.randint(0, 6)}",
        "title": f"{rng.choice(_VERBS)} {rng.choice(_THINGS)}",
        "status": rng.choice(_STATUS),
        "priority": rng.randint(1, 5),
        "assignee": rng.choice([*_NAMES, None]),
        "progress": round(rng.random(), 2),
        "depends_on": [f"task-{1000 + rng.randint(0, 200)}" for _ in range(rng.randint(0, 3))],
        "tags": rng.sample(_THINGS, rng.randint(0, 3)),
        "updated_at": _time(rng),
    }
    if rng.random() < 0.4:
        task["note"] = f"{rng.choice(_VERBS)} the {rng.choice(_THINGS)} before the {rng.choice(_THINGS)}"
    return task


def _time(rng: random.Random) -> str:
    month, day, hour, minute = (rng.randint(*r) for r in ((1, 12), (1, 28), (0, 23), (0, 59)))
    return f"2024-{month:02}-{day:02}T{hour:02}:{minute:02}:00Z"


def _update(state: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    after = copy.deepcopy(state)
    after["version"] += 1
    after["updated_at"] = _time(rng)
    tasks = after["tasks"]
    for _ in range(rng.randint(1, 5)):
        task = rng.choice(tasks)
        task["status"] = rng.choice(_STATUS)
        task["progress"] = round(rng.random(), 2)
        task["updated_at"] = _time(rng)
        if rng.random() < 0.3:
            task["assignee"] = rng.choice(_NAMES)
        if rng.random() < 0.2:
            task["note"] = f"{rng.choice(_VERBS)} {rng.choice(_THINGS)} again"
    if rng.random() < 0.5:
        tasks.append(_task(len(tasks), rng))
    if rng.random() < 0.25:
        del tasks[rng.randrange(len(tasks))]
    if rng.random() < 0.2:
        after["settings"]["retries"] += 1
    return after


class _Indented(yaml.SafeDumper):
    """Indents lists in mappings, too."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow)


def _write(form: str, state: dict[str, Any]) -> str:
    """form: "json" (indented by 2), "json_compact" (one line), or "yaml". No word has quotes of its own."""
    if form == "yaml":
        return yaml.dump(state, Dumper=_Indented, sort_keys=False, width=1000).replace("'", '"')
    shape: dict[str, Any] = {"indent": 2} if form == "json" else {"separators": (",", ":")}
    return json.dumps(state, **shape) + "\n"
