"""Cases with a known answer: perfect and unrelated predictions, and one-line edits."""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.corpus.build import Entry
from benchmarks.corpus.edits import one_line_edit
from benchmarks.corpus.files import hash_of
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
    return [e for e in entries if e.is_real and len(e.output) <= UNRELATED_TOKENS][::UNRELATED_ONE_IN]


def perfect(entries: Sequence[Entry]) -> list[Entry]:
    """Each output as its own prediction."""
    return [like(e, e.output, "perfect") for e in entries]


def unrelated(entries: Sequence[Entry]) -> list[Entry]:
    """Each output with the prediction of a record of another package, of the same sort of text and tokens."""
    found = []
    for entry in entries:
        alike = (e for e in entries if (e.text, e.tokens) == (entry.text, entry.tokens))
        others = [e for e in alike if e.package != entry.package and e.prediction]
        if others:
            other = random.Random(hash_of("unrelated", entry.id)).choice(others)
            found.append(like(entry, other.prediction, "unrelated_case"))
    return found


def one_line_edits(entries: Sequence[Entry], tokenizer: TextTokenizer) -> list[Entry]:
    """Files of about `FILE_TOKENS` tokens, whole lines, and each with one word or number of one line replaced."""
    found = []
    for entry in entries:
        if entry.tokens != "tekken" or len(entry.output) < FILE_TOKENS:
            continue
        text = "".join(token_texts(tokenizer, entry.output[:FILE_TOKENS])).rpartition("\n")[0] + "\n"
        before = tokenizer.encode(text)
        if len(before) < FILE_TOKENS // 2:
            continue  # one long line, and nothing before it
        for number in range(EDITS_A_FILE):
            rng = random.Random(hash_of("line", entry.id, str(number)))
            if (after := one_line_edit(text, text, rng)) is not None:
                edited = {"prediction": before, "output": tokenizer.encode(after)}
                found.append(entry._replace(id=f"{entry.id}#{number}", kind="one_line", **edited))
    return found


def like(entry: Entry, prediction: list[int], kind: str) -> Entry:
    """Its output with another prediction."""
    return entry._replace(id=f"{kind}:{entry.id}", kind=kind, prediction=prediction)
