"""Cases with a known answer: perfect and unrelated predictions, and one-line edits."""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.corpus.edits import one_line_edit
from benchmarks.corpus.files import hash_of
from benchmarks.quality.runs import Entry
from gpu_align.simulate import Record
from gpu_align.tools.simulate.tokenizers import TextTokenizer, token_texts

#: Length of the files that get a one-line edit, tokens; and edits a file.
FILE_TOKENS, EDITS_A_FILE = 1_000, 3
#: Outputs of at most so many tokens, one in so many, stand for all where a prediction is of no use.
UNRELATED_TOKENS, UNRELATED_ONE_IN = 2_500, 3


def least_steps(num_output: int, num_draft_tokens: int) -> int:
    """Steps for a perfect prediction: the prefill gives one token, each step after it K + 1."""
    return 1 + -(-(num_output - 1) // (num_draft_tokens + 1))


def hopeless(entries: Sequence[Entry]) -> list[Entry]:
    """Those of the real ones that `unrelated` predictions are tried on."""
    return [e for e in entries if e.is_real and len(e.record.output) <= UNRELATED_TOKENS][::UNRELATED_ONE_IN]


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


def _like(entry: Entry, prediction: list[int], kind: str) -> Entry:
    record = Record(f"{kind}:{entry.record.id}", [], prediction, entry.record.output, entry.record.tokenizer)
    return Entry(record, kind, entry.text, entry.package, entry.split, entry.tokens)
