"""One drafting step in plain Python, from one text and the context: what reference and kernel are checked against.

Recipes and indentation are not in it: they have examples by hand, and reference and kernel agree on random ones.
"""

from __future__ import annotations

from typing import NamedTuple

from gpu_align.ops.align import (
    GLOBAL_EVERY,
    GLOBAL_MATCH,
    LOCAL_MATCH,
    MATCH_WEIGHT,
    MAX_EDIT_LEN,
    MAX_EDITS_AT_ONCE,
    NEAREST,
    WINDOW,
)
from gpu_align.ops.compose import MAX_REPLAYS
from gpu_align.ops.layout import HASH, MAX_EDITS, PAGE, WAYS, context_index_bits, index_bits

MAX_MATCH, COMMON_WINDOW = 64, 7
LENGTH_EDGES = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 64)
MARGIN_EDGES = (-3, -1, 0, 1, 2, 3, 5, 9, 17)


def bucket_of(token: int, bits: int) -> int:
    return (token * HASH % 2**32) >> (32 - bits) if bits else 0


def common_suffix(a: list[int], b: list[int], most: int = MAX_MATCH) -> int:
    length = 0
    while length < min(most, len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return length


def common_before(a: list[int], b: list[int]) -> int:
    """The LCS of the last `COMMON_WINDOW` tokens of each."""
    a, b = a[-COMMON_WINDOW:], b[-COMMON_WINDOW:]
    rows = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, token in enumerate(a):
        for j, other in enumerate(b):
            rows[i + 1][j + 1] = rows[i][j] + 1 if token == other else max(rows[i][j + 1], rows[i + 1][j])
    return rows[-1][-1]


def rank(end: int, anchor: int) -> int:
    """Ties: the nearest to the anchor; at the same distance the one ahead of it."""
    return 2 * (end - anchor) if end >= anchor else 2 * (anchor - end) + 1


class Edit(NamedTuple):
    at: int
    after: int
    start: int  # output index of the new tokens
    old: int
    new: int
    repeats: bool  # one with the same key was remembered


class Candidate(NamedTuple):
    own: bool
    position: int
    matched: int
    common: int  # half of what the context has in common with the output before the match
    place: int
    room: int


class Oracle:
    """One request. `step` takes all its tokens so far and says what is drafted."""

    def __init__(self, prediction, prompt_len, tables, *, K, quarters, vocab_size, capacity, min_match=1,
                 use_context=True, kind=0, end_tokens=(), temperature=0):  # fmt: skip
        self.text, self.prompt_len, self.tables = list(prediction), prompt_len, tables
        self.K, self.quarters, self.vocab_size, self.capacity = K, quarters, vocab_size, capacity
        self.min_match, self.use_context = min_match, use_context
        #: Of a memory 32 tokens count as not in sync beforehand, and its beginning is no
        #: beginning of an output.
        self.memory = kind > 0
        #: Related answers have limits of their own, in the second block of the table; a skeleton in the third;
        #: several samples at a temperature in the others, and there they are of other classes.
        self.is_sampled = kind == 0 and temperature >= 0.3 and max(self.text, default=0) >= 2**31 - 2**16
        heat = (temperature >= 0.6) + (temperature >= 0.85)
        self.limits = 3 + heat if self.is_sampled else max(kind - 1, 0)
        #: Tokens that end the request; at a high temperature confidences are in the second block of the table,
        #: those of samples in the last three.
        self.end_tokens, self.block = set(end_tokens), 2 + heat if self.is_sampled else heat // 2
        self.text_bits = index_bits(-(-max(len(self.text), 1) // PAGE) * PAGE)
        self.context_index_bits = context_index_bits(capacity)
        self.seen = 0
        self.in_sync, self.cursor, self.anchor, self.diverged_at, self.num_in_sync = True, 0, 0, 0, 0
        self.num_common = 0  # of a run in sync, with the tokens that agreed before it
        self.row: list[int] = []
        self.edits: list[Edit | None] = []  # oldest first
        self.recent: dict[tuple[int, int], int] = {}

    # The index of the prediction.

    def nearest(self, token: int, anchor: int, most: int) -> list[int]:
        """Up to `most` ends of the token's bucket, around the anchor by rank in the bucket."""
        bucket = bucket_of(token, self.text_bits)
        ends = [e for e in range(1, len(self.text)) if bucket_of(self.text[e - 1], self.text_bits) == bucket]
        before = sum(e < anchor for e in ends)
        low = min(max(before - most // 2, 0), max(len(ends) - most, 0))
        return ends[low : low + most]

    # Realign.

    def has_key(self, place: int, edit: Edit | None) -> bool:
        if edit is None or place + 1 >= len(self.text):
            return False
        return edit.at == self.text[place] and edit.after == self.text[place + 1]

    def fold(self, output: list[int]) -> None:
        """Take in the last token of `output`."""
        text, token = self.text, output[-1]
        if self.in_sync:
            if self.cursor < len(text) and text[self.cursor] == token:
                # The place was left as it is: an edit that was made in such a place before is not made any more.
                self.edits = [None if self.has_key(self.cursor, e) else e for e in self.edits]
                self.cursor += 1
                self.num_in_sync += 1
                self.num_common += 1
                return
            self.in_sync, self.anchor, self.diverged_at = False, self.cursor, len(output) - 1
            self.num_common = 0
            self.row = [0] * (WINDOW + 1)
        window = text[self.anchor : self.anchor + WINDOW]
        row = [0] * (WINDOW + 1)
        for j in range(WINDOW):
            same = j < len(window) and window[j] == token
            row[j + 1] = max(row[j], self.row[j] + 1 if same else self.row[j + 1])
        self.row = row
        end = self.resync(output)
        if end is not None:
            self.resume(end, output)

    def resync(self, output: list[int]) -> int | None:
        text = self.text
        for end in range(self.anchor, self.anchor + WINDOW + 1):
            if LOCAL_MATCH <= end <= len(text) and output[-LOCAL_MATCH:] == text[end - LOCAL_MATCH : end]:
                return end
        if len(output) % GLOBAL_EVERY == 0:
            found = [
                e
                for e in self.nearest(output[-1], self.anchor, NEAREST)
                if common_suffix(text[:e], output) >= GLOBAL_MATCH
            ]
            return min(found, key=lambda e: rank(e, self.anchor), default=None)
        return None

    def resume(self, end: int, output: list[int]) -> None:
        length = common_suffix(self.text[self.anchor : max(end, self.anchor)], output[self.diverged_at :])
        if end < self.anchor:
            length = 0
        if end >= self.anchor:
            self.record(self.text[self.anchor : end], output)
        self.in_sync, self.cursor = True, end
        self.num_in_sync += length
        self.num_common = length

    def record(self, old: list[int], output: list[int]) -> None:
        """Record the edits between the tokens that old text and new have, from the last one on."""
        new = output[self.diverged_at :]
        near = [(i + j, i, j) for i in range(MAX_EDIT_LEN) for j in range(MAX_EDIT_LEN)]
        for _ in range(MAX_EDITS_AT_ONCE):
            length = common_suffix(old, new)
            old, new = old[: len(old) - length], new[: len(new) - length]
            if not old and not new:
                break
            inside = [(k, i, j) for k, i, j in near if i < len(old) and j < len(new)]
            common = [(k, i, j) for k, i, j in inside if old[-1 - i] == new[-1 - j]]
            _, i, j = min(common, default=(0, len(old), len(new)))
            old, new = old[: len(old) - i], new[: len(new) - j]
            place, start = self.anchor + len(old), self.diverged_at + len(new)
            if place + 1 < len(self.text) and max(i, j) <= MAX_EDIT_LEN:
                after = self.text[place + 1]
                said = *output[start : start + 1][:j], i, j
                same = (
                    e for e in self.edits if e and (*output[e.start : e.start + 1][: e.new], *e[3:5]) == said
                )
                repeats = any(self.has_key(place, e) for e in same)
                edit = Edit(self.text[place], after, start, i, j, repeats)
                self.edits = [*self.edits, edit][-MAX_EDITS:]

    def standing(self) -> int:
        """The cursor: the smallest j with the largest ``MATCH_WEIGHT * H[j] - j`` behind the anchor."""
        if self.in_sync:
            return self.cursor
        scores = self.scores()
        return self.anchor + scores.index(max(scores))

    def scores(self) -> list[int]:
        num = min(WINDOW, len(self.text) - self.anchor)
        return [MATCH_WEIGHT * self.row[j] - j for j in range(num + 1)]

    # Draft.

    def place_of(self, position: int, cursor: int) -> int:
        away = position - cursor
        if away in (0, 1):
            return away
        if self.in_sync:
            deficit = away if away > 0 else 2 - away
        else:
            scores, j = self.scores(), position - self.anchor
            deficit = max(scores) - scores[j] if 0 <= j < len(scores) else 99
        return 2 if deficit <= 16 else 3

    def candidates(self, tokens: list[int]) -> tuple[list[Candidate | None], int]:
        text, output, total = self.text, tokens[self.prompt_len :], len(tokens)
        cursor = self.standing() if text else 0
        settled = self.num_common >= MAX_MATCH
        found: list[Candidate | None] = []
        matches = []
        if output:
            for e in self.nearest(output[-1], cursor, WAYS):
                matched = common_suffix(text[:e], output)
                if matched >= self.min_match:
                    common = common_before(text[: e - matched], output[: len(output) - matched])
                    matches.append((-matched, 0 if settled else -common, rank(e, cursor), e))
        for matched, _, _, e in (*sorted(matches)[:4], *[(0, 0, 0, -1)] * 4)[:4]:
            found.append(
                Candidate(False, e, -matched, 0, self.place_of(e, cursor), len(text) - e) if e > 0 else None
            )
        for position in (cursor, cursor + 1):
            inside = 0 <= position < len(text)
            matched = common_suffix(text[: max(position, 0)], output)
            place = self.place_of(position, cursor)
            found.append(
                Candidate(False, position, matched, 0, place, len(text) - position) if inside else None
            )
        matches = []
        if self.use_context and total:
            bucket = bucket_of(tokens[-1], self.context_index_bits)
            for way in range(WAYS):
                e = self.recent.get((bucket, way), -1)
                matched = common_suffix(tokens[:e], tokens) if 0 <= e < total else 0
                if matched >= self.min_match:
                    common = common_before(tokens[: e - matched], tokens[: total - matched])
                    matches.append((-matched, 0 if settled else -common, -e, e))
        for matched, common, _, e in (*sorted(matches)[:4], *[(0, 0, 0, -1)] * 4)[:4]:
            found.append(Candidate(True, e, -matched, -common // 2, 4, total - e) if e > 0 else None)
        return found, cursor

    def classes(self, found: list[Candidate | None], tokens: list[int]) -> list[int]:
        following = [None if c is None else (tokens if c.own else self.text)[c.position] for c in found]
        num_output = max(len(tokens) - self.prompt_len, 0)
        weighed = num_output + (32 if self.memory else 0)
        adherence = 0 if 8 * self.num_in_sync < weighed else 1 if 2 * self.num_in_sync < weighed else 2
        # Of a prediction that the output does not follow nothing is heard.
        heard = [
            (c, t) for c, t in zip(found, following, strict=True) if c is not None and (adherence or c.own)
        ]
        reach = max((c.matched + c.common for c, _ in heard), default=0)
        leader = next((t for c, t in heard if c.matched + c.common == reach), None)
        runner_up = max((c.matched + c.common for c, t in heard if t != leader), default=0)
        classes = []
        for c, t in zip(found, following, strict=True):
            if c is None:
                classes.append(-1)
                continue
            strength = c.matched + c.common
            margin = strength - (runner_up if t == leader else reach)
            by_margin = sum(margin >= edge for edge in MARGIN_EDGES)
            by_adherence = adherence
            if self.is_sampled:
                # How many expect another token after as long a match; how many go on alike for 8 tokens, up to 2.
                others = [(o, self.ahead(o, tokens)) for o in found if o is not None]
                mine = self.ahead(c, tokens)
                by_margin = sum(o.matched + o.common >= strength and to[0] != t for o, to in others)
                by_adherence = min(sum(to == mine for _, to in others) - 1, 2)
            length = sum(strength >= edge for edge in LENGTH_EDGES)
            classes.append(((length * 10 + by_margin) * 5 + c.place) * 3 + by_adherence)
        return classes

    def ahead(self, c: Candidate, tokens: list[int]) -> list[int]:
        """The next 8 tokens of a candidate; after the end of its text its last one again."""
        text = tokens if c.own else self.text
        return [text[min(c.position + i, len(text) - 1)] for i in range(8)]

    def compose(self, position: int, num: int, tokens: list[int]) -> list[int]:
        """`num` tokens of the prediction from `position` on, with what was edited before edited again."""
        text = self.text
        draft: list[int] = []
        replays = 0
        # Edits that repeat none are made again only by an output that repeats its edits.
        trusted = sum(e is not None and e.repeats for e in self.edits) >= self.edits.count(None)
        while len(draft) < num and position < len(text):
            edit = next(
                (
                    e
                    for e in reversed(self.edits)
                    if e is not None and (e.repeats or trusted)
                    if self.has_key(position, e) and position + e.old <= len(text)
                ),
                None,
            )
            if edit is None or replays == MAX_REPLAYS:
                draft.append(text[position])
                position += 1
                continue
            replays += 1
            start = self.prompt_len + edit.start
            draft += tokens[start : start + edit.new]
            position += edit.old
            draft += text[position : position + 1]
            position += 1
        return draft[:num]

    def update_state(self, tokens: list[int]) -> None:
        """Bring what is known up to date: `tokens` are all so far, prompt and output."""
        for e in range(1, len(tokens)):
            if self.use_context:
                way = bucket_of(tokens[e - 1], self.context_index_bits), e % WAYS
                self.recent[way] = max(self.recent.get(way, -1), e)
        for done in range(self.seen, len(tokens) - self.prompt_len):
            if self.text:
                self.fold(tokens[self.prompt_len : self.prompt_len + done + 1])
        self.seen = max(len(tokens) - self.prompt_len, 0)

    def step(self, tokens: list[int]) -> tuple[list[int], int, int]:
        """``(draft, class, source)`` after `tokens`, prompt and output; -1 without a draft."""
        tokens = list(tokens)
        self.update_state(tokens)
        found, cursor = self.candidates(tokens)
        classes = self.classes(found, tokens)
        num_output = max(len(tokens) - self.prompt_len, 0)  # a prompt that is not all there: no output yet
        best, best_value, best_num = None, 0, 0
        for i, (c, class_id) in enumerate(zip(found, classes, strict=True)):
            if c is None or c.room <= 0:
                continue
            num = self.K if c.matched >= MAX_MATCH else min(self.quarters * (c.matched + 1) // 4, self.K)
            row = class_id + self.limits * len(self.tables.confidence) // 5
            num = min(num, int(self.tables.max_draft_len[row]))
            value = int(self.tables.expected_accepted[row, num])
            at_start = self.in_sync and cursor == self.num_in_sync == num_output <= MAX_MATCH
            if i == 4 and at_start and not self.memory and not self.is_sampled:
                num, value = self.K, 2**31 - 1  # all of the output is the beginning of the prediction
            if value > best_value:
                best, best_value, best_num = i, value, num
        if best is None:
            return [], -1, 0
        c = found[best]
        assert c is not None
        class_id = classes[best] + self.block * len(self.tables.confidence) // 5
        source = 2 if c.own else 4 if self.memory else 1
        if c.own:
            span = len(tokens) - c.position  # a match as long says that the output repeats itself
            num = best_num if c.matched >= span else min(best_num, span)
            draft = [tokens[c.position + k % span] for k in range(num)]
        else:
            draft = self.compose(c.position, best_num, tokens)
        draft = draft[: max(self.capacity - len(tokens), 0)]
        for k, token in enumerate(draft):
            if not 0 <= token < self.vocab_size:
                draft = draft[:k]
                break
            if token in self.end_tokens:
                draft = draft[: k + 1]
                break
        return (draft, class_id, source) if draft else ([], -1, 0)
