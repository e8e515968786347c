"""OpenAI's service as reverse-engineered: letters, one token each, and the counts of accepted and rejected.

Source: https://vamvas.ch/openai-predicted-outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, product
from string import ascii_lowercase
from typing import Any, NamedTuple

import numpy as np

from benchmarks.quality.replays import replay_batched
from gpu_align.policies import OpenAI
from gpu_align.predictors.base import count_accepted
from gpu_align.simulate import Record

#: Letters of the short and of the long draft: a to e, and the pairs aa, ab, … bc written out.
SHORT, LONG = 5, 58
#: Where the short and the long draft differ from the output. It follows from the counts, see `positions_of`: the
#: long ones could also differ at 5, and differ at 21 where the engine discards its own token.
SHORT_AT, LONG_AT, LONG_AT_DISCARDING = 3, 22, 21
#: Draft tokens a step in the service; and K, which is longer, so that the policy's own limit holds.
LOOKAHEAD, K = 16, 64


class Rule(NamedTuple):
    """What the tasks are run by.

    Attributes:
        resume_after, resume_delay: the settings of `OpenAI`.
        missing_letters: by how much the long text is shorter.
        same_draft: the draft is the same in all tasks, and the output differs; else the other way round.
        discards_own: the engine drops the model's own token after a lookahead that was accepted whole, and
            verifies the next one from there. Such tokens are in neither count.
    """

    resume_after: int = 32
    resume_delay: int = 0
    missing_letters: int = 0
    same_draft: bool = True
    discards_own: bool = False


#: The rule as it was published, and others, by their names in the results.
RULE = Rule()
RULES = {
    "threshold_35": Rule(resume_after=35),
    "rule": RULE,
    "delay_3": Rule(resume_delay=3),
    "55_letters_discard_delay_1": Rule(resume_delay=1, missing_letters=3, discards_own=True),
    "same_output": Rule(same_draft=False),
}
#: What a task's draft has, compared with the output.
KINDS = ("added", "missing", "replaced")
#: The token that an edit inserts; no letter has its id.
OTHER = len(ascii_lowercase)

Counts = tuple[int, int]


class Task(NamedTuple):
    """One task: letters to write, a draft, and the published counts.

    Attributes:
        name: in tables.
        size: letters.
        kind: one of `KINDS`, or "correct".
        at: where draft and output differ.
        published: accepted and rejected.
    """

    name: str
    size: int
    kind: str
    at: int
    published: Counts


TASKS = (
    Task("short, correct", SHORT, "correct", 0, (5, 0)),
    Task("short, one token added", SHORT, "added", SHORT_AT, (3, 2)),
    Task("short, one token missing", SHORT, "missing", SHORT_AT, (3, 2)),
    Task("short, one token replaced", SHORT, "replaced", SHORT_AT, (3, 2)),
    Task("long, correct", LONG, "correct", 0, (55, 0)),
    Task("long, one token added", LONG, "added", LONG_AT, (21, 11)),
    Task("long, one token missing", LONG, "missing", LONG_AT, (22, 11)),
    Task("long, one token replaced", LONG, "replaced", LONG_AT, (21, 11)),
)


def tokenize(letters: str) -> list[int]:
    """One token a letter."""
    return [ascii_lowercase.index(letter) for letter in letters]


def letters_of(size: int) -> list[int]:
    """The short text is the alphabet of single letters, a longer one that of two letters: aa, ab, ac, …"""
    if size <= len(ascii_lowercase):
        return tokenize(ascii_lowercase[:size])
    pairs = ("".join(pair) for pair in product(ascii_lowercase, repeat=2))
    return tokenize("".join(islice(pairs, -(-size // 2)))[:size])


def draft_and_output(
    kind: str, letters: Sequence[int], at: int, same_draft: bool = True
) -> tuple[list, list]:
    """A draft that has one token more or less than the output, or another one.

    Args:
        kind: "correct", or one of `KINDS`: what the draft has.
        letters: the draft, or the output.
        at: the position of the token.
        same_draft: the letters are the draft, and the output differs; else the other way round.
    """
    before, after, same = list(letters[:at]), list(letters[at:]), list(letters)
    longer, shorter, replaced = [*before, OTHER, *after], before + after[1:], [*before, OTHER, *after[1:]]
    if kind == "correct":
        return same, same
    other = longer if (kind == "missing") == same_draft else shorter
    if kind == "replaced":
        other = replaced
    return (same, other) if same_draft else (other, same)


class Usage(NamedTuple):
    """What the service would report, and the verification steps it took."""

    accepted: int
    rejected: int
    steps: int

    @property
    def counts(self) -> Counts:
        return self.accepted, self.rejected


def usage_of(draft: Sequence[int], output: Sequence[int], rule: Rule = RULE) -> Usage:
    """Run the policy with the draft verified from the first token on.

    Draft tokens behind the last token of the output count as rejected, because they were verified as well.
    """
    policy = OpenAI(resume_after=rule.resume_after, resume_delay=rule.resume_delay)
    policy.start([], draft, K)
    done = steps = drafted = accepted = 0
    while done < len(output):
        offered = policy.propose()
        end = done + count_accepted(offered, output[done:])
        drafted, accepted = drafted + len(offered), accepted + end - done
        whole = end - done == LOOKAHEAD
        tokens = output[done : end if whole and rule.discards_own else end + 1]
        policy.extend(tokens)
        done += len(tokens)
        steps += 1
    return Usage(accepted, drafted - accepted, steps)


def counts_of(task: Task, rule: Rule = RULE) -> Counts:
    """Accepted and rejected in a task."""
    long = task.size == LONG
    letters = letters_of(task.size - rule.missing_letters if long else task.size)
    at = LONG_AT_DISCARDING if rule.discards_own and task.at == LONG_AT else task.at
    return usage_of(*draft_and_output(task.kind, letters, at, rule.same_draft), rule).counts


def positions_of(task: Task, rule: Rule) -> list[int]:
    """Where an edit of this kind gives the published counts."""
    return [at for at in range(task.size) if counts_of(task._replace(at=at), rule) == task.published]


def run_tasks() -> list[dict[str, Any]]:
    """Every task by every rule, and where an edit would give the published counts with the threshold."""
    return [
        {
            **task._asdict(),
            "here": {name: counts_of(task, rule) for name, rule in RULES.items()},
            "positions": [] if task.kind == "correct" else positions_of(task, RULES["threshold_35"]),
        }
        for task in TASKS
    ]


def bifurcations(size: int = LONG) -> dict[str, Any]:
    """Accepted and rejected for an output that leaves the draft at each position: for good, and for one token."""
    letters = letters_of(size)
    rows: dict[str, list[Counts]] = {"for good": [], **{kind: [] for kind in KINDS}}
    for at in range(size):
        rows["for good"].append(usage_of(letters, letters[:at] + [OTHER] * (size - at)).counts)
        for kind in KINDS:
            rows[kind].append(usage_of(*draft_and_output(kind, letters, at)).counts)
    return {
        "size": size,
        "most_rejected": max(rejected for row in rows.values() for _, rejected in row),
        "accepted": {name: [accepted for accepted, _ in row] for name, row in rows.items()},
        "rejected": {name: [rejected for _, rejected in row] for name, row in rows.items()},
    }


def insertions(lengths: Iterable[int], every: int = 1, size: int = LONG) -> dict[str, Any]:
    """An output with tokens inserted that the draft lacks: position × length.

    Beside the counts of the rule the steps it takes, and those of this library's drafter, whose drafts are
    verified from the first token on as well and have at most as many tokens.
    """
    letters, positions, lengths = letters_of(size), list(range(0, size + 1, every)), list(lengths)
    records = []
    for length in lengths:
        inserted = list(range(OTHER, OTHER + length))
        for at in positions:
            output = [*letters[:at], *inserted, *letters[at:]]
            records.append(Record(f"{at}+{length}", [], letters, output))
    rows = [usage_of(record.prediction, record.output) for record in records]
    ours = replay_batched(records, LOOKAHEAD, draft_in_prefill=True)
    table = np.array(rows).reshape(len(lengths), len(positions), 3)
    our_steps = np.array([pair.steps for pair in ours]).reshape(table.shape[:2])
    return {
        "size": size,
        "positions": positions,
        "lengths": lengths,
        "accepted": table[..., 0].tolist(),
        "rejected": table[..., 1].tolist(),
        "steps": table[..., 2].tolist(),
        "our_steps": our_steps.tolist(),
    }


def measure(quick: bool = False) -> dict[str, Any]:
    """All of OpenAI's; `quick` with a coarse grid."""
    return {
        "tasks": run_tasks(),
        "bifurcations": bifurcations(),
        "insertions": insertions(range(0, 41, 20 if quick else 2), every=20 if quick else 1),
    }
