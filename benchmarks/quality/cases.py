"""Cases with a known answer: perfect and unrelated predictions, one-line edits, and the steps after an edit."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rapidfuzz.distance import LCSseq

from benchmarks.corpus.edits import one_line_edit
from benchmarks.corpus.files import hash_of
from benchmarks.quality.runs import Entry
from gpu_align.predictors import PredictorLoop
from gpu_align.simulate import Record
from gpu_align.tools.simulate.policies import OURS, make_policies
from gpu_align.tools.simulate.tokenizers import TextTokenizer, token_texts

#: Length of the files that get a one-line edit, tokens; and edits a file.
FILE_TOKENS, EDITS_A_FILE = 1_000, 3
#: A stretch of the prediction that the output follows for fewer tokens is no re-entry.
MIN_RESUMED = 8
#: Outputs of at most so many tokens, one in so many, stand for all where a prediction is of no use.
UNRELATED_TOKENS, UNRELATED_ONE_IN = 2_500, 3


def least_steps(num_output: int, num_draft_tokens: int) -> int:
    """Steps for a perfect prediction: the prefill gives one token, each step after it K + 1."""
    return 1 + -(-(num_output - 1) // (num_draft_tokens + 1))


def real(entries: Sequence[Entry]) -> list[Entry]:
    """Those that are changes between two releases, in the tokens of the shipped tables."""
    return [e for e in entries if e.tokens == "tekken" and e.kind == e.text]


def hopeless(entries: Sequence[Entry]) -> list[Entry]:
    """Those of the `real` ones that `unrelated` predictions are tried on."""
    return [e for e in real(entries) if len(e.record.output) <= UNRELATED_TOKENS][::UNRELATED_ONE_IN]


def perfect(entries: Sequence[Entry]) -> list[Entry]:
    """Each output as its own prediction."""
    return [_like(e, e.record.output, "perfect") for e in entries]


def without_prediction(entries: Sequence[Entry]) -> list[Entry]:
    """The same outputs, and nothing predicted."""
    return [_like(e, [], "nothing") for e in entries]


def unrelated(entries: Sequence[Entry]) -> list[Entry]:
    """Each output with the prediction of a record of another package, of the same sort of text and tokens."""
    found = []
    for entry in entries:
        alike = (e for e in entries if (e.text, e.tokens) == (entry.text, entry.tokens))
        others = [e for e in alike if e.package != entry.package and e.record.prediction]
        if others:
            other = random.Random(hash_of("unrelated", entry.record.id)).choice(others)
            found.append(_like(entry, other.record.prediction, "unrelated_case"))
    return found


def one_line_edits(entries: Sequence[Entry], tokenizer: TextTokenizer) -> list[Entry]:
    """Files of about `FILE_TOKENS` tokens, whole lines, and each with one word or number of one line replaced."""
    found = []
    for entry in entries:
        record = entry.record
        if entry.tokens != "tekken" or len(record.output) < FILE_TOKENS:
            continue
        text = "".join(token_texts(tokenizer, record.output[:FILE_TOKENS])).rpartition("\n")[0] + "\n"
        before = tokenizer.encode(text)
        if len(before) < FILE_TOKENS // 2:
            continue  # one long line, and nothing before it
        for number in range(EDITS_A_FILE):
            rng = random.Random(hash_of("line", record.id, str(number)))
            after = one_line_edit(text, text, rng)
            if after is not None:
                pair = Record(f"{record.id}#{number}", [], before, tokenizer.encode(after), record.tokenizer)
                found.append(Entry(pair, "one_line", entry.text, entry.package, entry.split, entry.tokens))
    return found


class Resumption(NamedTuple):
    """What happened at the first step with two tokens of the prediction matched again.

    edits: places where the output left the prediction and came back, and a step began inside the part that it came
    back to; of them, where that step drafted something, and where its first token was right.
    """

    edits: int = 0
    drafted: int = 0
    right: int = 0

    @classmethod
    def total(cls, parts: Iterable[tuple[int, int, int]]) -> Resumption:
        """The sums of these."""
        return cls(*map(sum, zip(*parts, strict=True)))


def reentries(prediction: Sequence[int], output: Sequence[int]) -> list[tuple[int, int]]:
    """``(start in the output, length)`` of every stretch that follows the prediction again after an edit.

    By the LCS alignment of the two: an "equal" block of `MIN_RESUMED` tokens or more that something inserted,
    deleted or replaced comes before.
    """
    found = []
    edited = False
    for operation in LCSseq.opcodes(prediction, output):
        start, end = operation.dest_start, operation.dest_end
        if operation.tag != "equal":
            edited = True
        elif edited and end - start >= MIN_RESUMED:
            found.append((start, end - start))
            edited = False
    return found


def resumptions(records: Sequence[Record], num_draft_tokens: int) -> list[Resumption]:
    """Replay with our drafter, and look at the first step after each edit of each record.

    For a stretch that begins at output token j (`reentries`) this is the first step that starts with
    ``n >= j + 2`` tokens known, so that the last two of them, or more, are tokens of the stretch. Edits that one
    step passes over whole, because a draft from elsewhere was accepted across them, have no such step and do not
    count.
    """
    if not records:
        return []
    [policy] = make_policies([OURS], records, num_draft_tokens)
    loop = PredictorLoop(policy, num_draft_tokens=num_draft_tokens, strict=True)
    found = []
    for record in records:
        pending = reentries(record.prediction, record.output)
        steps = []
        loop.start(record.prompt, record.prediction)
        for step in loop.follow(record.output):
            while pending and pending[0][0] + 2 <= step.start:
                start, size = pending.pop(0)
                if step.start < start + size:
                    steps.append((1, bool(step.draft), step.accepted > 0))
        found.append(Resumption.total(steps))
    return found


def _like(entry: Entry, prediction: list[int], kind: str) -> Entry:
    record = Record(f"{kind}:{entry.record.id}", [], prediction, entry.record.output, entry.record.tokenizer)
    return Entry(record, kind, entry.text, entry.package, entry.split, entry.tokens)
