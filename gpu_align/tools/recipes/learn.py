"""Learn which words, and which tokens of a model's answers, follow which so often that a recipe is worth it."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from ...ops.lcs import lcs_length
from ...ops.recipes import MAX_CONTEXT, SHAPE_NUMBER, SHAPE_START, SHAPE_WINDOW
from ...recipes.pack import MAX_WORDS, RecipePack
from ...recipes.tokenize import Chains, Encode, IntArray, Observed, Recipe, TokenTexts, class_of, fingerprint

BoolArray = npt.NDArray[np.bool_]
#: A task, a prompt, and k samples of what a model answers.
Group = tuple[str, str, Sequence[str]]

#: Of words: how often a context must be seen.
MIN_SEEN = 3
#: A recipe of words is at least this likely, or it contradicts a shorter context.
MIN_LIKELY = 0.3
#: A context of words says nothing new where its probability is within this of a shorter context's.
SAME_WORDS = 0.1
#: Tokens of a sample that are aligned: the table of two samples takes 4 bytes for each pair of their tokens.
MAX_ALIGNED = 8192
#: An entry is kept where its token followed at least this share of all occurrences of its context.
CERTAIN = 0.95
#: A longer context that says the same is not kept where the shorter one is at least this certain, or within this.
SAME = 0.05
#: A longer context after which the token of the shorter one has a smaller share takes that one back.
BLOCKED = 0.7
#: Groups that agree on it, where there are several: so many, and this share of all. In more groups there are more
#: contexts that go on alike in two of them by chance.
MIN_GROUPS, MIN_SHARE = 2, 0.01
#: A context that stands in half of the samples of a group, and in so many, counts as agreed if all go on alike.
MIN_RECURRING, NEVER = 3, 1 << 62
#: The share of a token's occurrences that are determined, if it stays itself in shapes.
KEPT = 0.5
#: A context is kept for a longer run where it adds so many tokens at all of its occurrences together.
LONGER = 8


# What GPT-4's, Llama 3's, Qwen's and Tekken's own patterns cut a text into, or a little more at once: letters with
# one sign or space before them, digits, signs with what ends their line, line ends, spaces.
_WORD = re.compile(
    r"""
      [^\r\n\w]?[^\W\d_]+
    | _[^\W\d_]+
    | \d+
    | [ ]?(?:[^\s\w]|_)+[\r\n/]*
    | \s*[\r\n]+
    | \s+(?!\S)
    | \s+
    """,
    re.VERBOSE,
)


def words_of(text: str) -> list[str]:
    """The words of a text; joined, they are the text."""
    return _WORD.findall(text)


def learn(texts: Iterable[tuple[str, str]], made_by: str = "") -> RecipePack:
    """Learn from pairs of a source, a project for example, and a text of it.

    Recipes that only one source writes are left out, unless there is only one source. The order of the texts does
    not matter. made_by: the command.

    ::

        for each context of 1, 2, .. MAX_WORDS words, in the order of length and spelling:
            word = the one that followed most often, the first spelling of equal ones
            share = how often it did / how often the context was seen
            told, before = word and share of the longest kept context that this one ends with
            if it was seen MIN_SEEN times, and several sources write the word there (or there is one source):
                if nothing is told, or told != word and before < MIN_LIKELY:    keep it if share >= MIN_LIKELY
                else:    keep it if told != word or abs(before - share) >= SAME_WORDS
        words: those of recipes, and those seen MIN_SEEN times, in several sources
    """
    spellings, positions, num_sources = _read(texts)
    min_sources = min(num_sources, 2)
    recipes: list[Recipe] = []
    # What the longest kept context expects at each position, and how likely.
    said, share = np.full(len(positions.tokens), -1), np.zeros(len(positions.tokens))
    for length, (context, first) in zip(range(1, MAX_WORDS + 1), positions.numbered(False), strict=False):
        at = np.flatnonzero(context >= 0)
        top = follow(positions, context, _pairs(positions, context, at))
        own = top.hits / top.seen
        told, before = said[first], share[first]
        agrees = told == top.token
        unsaid = (told < 0) | (~agrees & (before < MIN_LIKELY))
        is_news = np.where(unsaid, own >= MIN_LIKELY, ~agrees | (np.abs(before - own) >= SAME_WORDS))
        is_kept = is_news & (top.seen >= MIN_SEEN) & (top.groups >= min_sources)
        kept, at = np.flatnonzero(is_kept), at[is_kept[context[at]]]
        said[at], share[at] = top.token[context[at]], own[context[at]]
        # Word numbers are in the order of their spellings.
        spelled = positions.contexts(False, first[kept], length)
        for row in np.lexsort(spelled.T[::-1]):
            words, i = tuple(spellings[w] for w in spelled[row]), kept[row]
            recipes.append(Recipe(words, spellings[top.token[i]], int(top.hits[i]), int(top.seen[i])))
    seen = np.bincount(positions.tokens, minlength=len(spellings))
    often = (seen >= MIN_SEEN) & (_groups_of(positions.tokens, positions.group, len(seen)) >= min_sources)
    named = {word for recipe in recipes for word in (*recipe.context, recipe.word)}
    ranked = [w for w in np.argsort(-seen, kind="stable") if often[w] or spellings[w] in named]
    return RecipePack({spellings[w]: int(seen[w]) for w in ranked}, recipes, made_by=made_by)


def _read(texts: Iterable[tuple[str, str]]) -> tuple[list[str], Positions, int]:
    """The spellings, the words of all texts as their numbers, a group a source; and how many sources there are."""
    numbers: dict[str, int] = {}
    sources: defaultdict[str, list[IntArray]] = defaultdict(list)
    for name, text in texts:
        words = [numbers.setdefault(word, len(numbers)) for word in words_of(text)]
        sources[name].append(np.array(words, np.int32))
    spellings = sorted(numbers)
    rank = np.empty(len(numbers), np.int32)
    rank[[numbers[word] for word in spellings]] = np.arange(len(numbers))
    groups = [[rank[words] for words in group] for group in sources.values()]
    positions = Positions(groups, [np.zeros((0, len(group)), np.int64) for group in groups])
    return spellings, positions, len(groups)


def observe(
    groups: Iterable[Group],
    encode: Encode,
    token_texts: TokenTexts,
    *,
    agree: float = 1.0,
    task: str = "",
    made_by: str = "",
    progress: Callable[[str, int], None] | None = None,
) -> RecipePack:
    """Learn from the answers of a model: k samples for each prompt of a task; see `recipes/README.md`.

    Args:
        groups: ``(task, prompt, samples)`` each. Of one sample nothing is determined.
        encode, token_texts: as in `RecipePack.tokenize`.
        agree: the share of the samples that must agree; above 0, at most 1.
        task: of the pack; if empty, the groups' tasks, joined by ``+``.
        made_by, progress: the command; called as ``progress(task, 1)`` after each group.
    """
    if not 0 < agree <= 1:
        raise ValueError(f"agree: expected 0 < share <= 1, found {agree}")
    samples: list[list[IntArray]] = []
    found: list[IntArray] = []
    tasks: dict[str, None] = {}
    for named, _, texts in groups:
        tasks[named] = None
        tokens = [np.asarray(ids, dtype=np.int32) for ids in encode(list(texts))] if texts else []
        samples.append(tokens)
        found.append(columns(tokens, agree))
        if progress is not None:
            progress(named, 1)
    task = task or "+".join(filter(None, tasks))
    pack = RecipePack({}, [], task=task, tokenizer=fingerprint(encode), made_by=made_by)
    positions = Positions(samples, found)
    if not len(positions.column):
        return pack
    several = len(samples) > 1
    ids, number = np.unique(positions.tokens, return_inverse=True)
    item_of = np.array([class_of(text) for text in token_texts(ids.tolist())], dtype=np.int64)
    # Kept are those that are mostly determined, and in two groups where there are.
    determined = np.bincount(number[positions.determined], minlength=len(ids))
    kept = determined >= KEPT * np.bincount(number)
    kept &= _groups_of(number, positions.group, len(ids)) >= (MIN_GROUPS if several else 1)
    kept &= item_of != SHAPE_NUMBER
    item_of[kept] = ids[kept]
    positions.set_shapes(item_of[number])
    min_groups = max(MIN_GROUPS, math.ceil(MIN_SHARE * len(samples))) if several else 1
    candidates = list(_candidates(positions, ids[kept], min_groups))
    shape_of = dict(zip(ids.tolist(), item_of.tolist(), strict=True))
    chains = Chains((entry for entry, new in candidates if new), shape_of)
    entries = sorted(_chosen(candidates, chains), key=by_frequency)
    return replace(pack, observed=tuple(entries), kept=tuple(ids[kept].tolist()))


def _groups_of(number: IntArray, group: IntArray, num: int) -> IntArray:
    """[num]: in how many groups each number stands. number, group: [M]."""
    return np.bincount(np.unique(number.astype(np.int64) << 32 | group) >> 32, minlength=num)


def by_frequency(entry: Observed) -> tuple[Any, ...]:
    """The order of the entries of a pack: what was seen most often first."""
    return -entry.seen, -entry.hits, entry.is_shape, len(entry.context), entry.context


def columns(samples: Sequence[IntArray], agree: float = 1.0) -> IntArray:
    """[columns, k]: where each determined token stands in each sample, -1 in samples that do not have it.

    ::

        pivot = the first sample; with agree < 1 the one with the largest sum of LCS lengths with the others
        for each token of pivot:
            position[s] = where a longest common subsequence with sample s has it
            it is determined if at least agree · k samples, the pivot among them, have it

    samples: k token sequences; of each the first `MAX_ALIGNED` tokens are aligned. Of one sample nothing is
    determined. Example: ``[5, 6, 7]`` and ``[5, 8, 7]`` have the columns ``[[0, 0], [2, 2]]``.
    """
    k = len(samples)
    if k < 2 or (agree == 1.0 and not all(map(len, samples))):
        return np.zeros((0, k), dtype=np.int64)
    rows = [torch.from_numpy(np.array(sample[:MAX_ALIGNED], dtype=np.int32)) for sample in samples]
    lengths = torch.tensor(list(map(len, rows)), dtype=torch.int32)
    pivot = 0
    if agree < 1:
        tokens = pad_sequence(rows, batch_first=True)
        each = (lcs_length(tokens[s].repeat(k, 1), lengths[s].repeat(k), tokens, lengths) for s in range(k))
        total = [int(common.sum()) for common in each]
        pivot = total.index(max(total))
    place = np.full((len(rows[pivot]), k), -1, dtype=np.int64)
    place[:, pivot] = np.arange(len(place))
    for s in {*range(k)} - {pivot}:  # one at a time: the table of a pair is what takes memory
        for i, j in matched(rows[s].numpy(), rows[pivot].numpy()):
            place[j, s] = i
    found: IntArray = place[(place >= 0).sum(axis=1) >= max(math.ceil(agree * k - 1e-9), 2)]
    return found


def matched(tokens: IntArray, text: IntArray) -> list[tuple[int, int]]:
    """The pairs of positions of a longest common subsequence, the last first. Memory: 4 bytes a pair of tokens."""
    # [i, j]: the LCS of the first i tokens and the first j of the text.
    table = np.zeros((len(tokens) + 1, len(text) + 1), np.int32)
    for i, token in enumerate(tokens):
        best = np.maximum(table[i, 1:], table[i, :-1] + (text == token))
        np.maximum.accumulate(best, out=table[i + 1, 1:])
    pairs: list[tuple[int, int]] = []
    i, j = len(tokens), len(text)
    while i and j:
        if table[i, j - 1] == table[i, j]:
            j -= 1
        elif table[i - 1, j] == table[i, j]:
            i -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((i, j))
    return pairs


class Positions:
    """The N positions of all samples: position p is the one before token p; and where their groups agree.

    tokens: [N] int32, those of all samples, one after the other. begin, group, sample: [N], where the sample of
    each begins, its group, and its number over all groups. determined, column: the positions of the determined
    tokens, those of a column side by side, and where each column begins among them. recurring: [groups]: a context
    in so many samples of a group counts as agreed, wherever they have it.
    """

    def __init__(self, groups: Sequence[Sequence[IntArray]], found: Sequence[IntArray]) -> None:
        """found: `columns` of each group."""
        samples = [(g, sample) for g, group in enumerate(groups) for sample in group]
        lengths = np.array([len(sample) for _, sample in samples], dtype=np.int64)
        first = np.cumsum(lengths) - lengths
        empty = np.zeros(0, dtype=np.int64)
        tokens: list[IntArray] = [empty.astype(np.int32), *(sample for _, sample in samples)]
        self.tokens: IntArray = np.concatenate(tokens)
        self.begin: IntArray = np.repeat(first, lengths)
        self.group: IntArray = np.repeat(np.array([g for g, _ in samples], dtype=np.int64), lengths)
        self.sample: IntArray = np.repeat(np.arange(len(samples)), lengths)
        self._items = self._places = self._older = empty
        determined, size, number = [empty], [empty], 0
        for group, place in zip(groups, found, strict=True):
            there = place >= 0
            determined.append((place + first[number : number + len(group)])[there])
            size.append(there.sum(axis=1))
            number += len(group)
        sizes = np.concatenate(size)
        self.determined, self.column = np.concatenate(determined), np.cumsum(sizes) - sizes
        enough = [max(MIN_RECURRING, -(-len(group) // 2)) if len(groups) > 1 else NEVER for group in groups]
        self.recurring: IntArray = np.array(enough, dtype=np.int64)

    def set_shapes(self, item_of: IntArray) -> None:
        """Say what the shape item of each token is; item_of: [N]."""
        # The stream: before each sample's tokens the item of its beginning.
        place = np.arange(len(self.tokens)) + self.sample + 1
        stream = np.full(len(place) + (int(self.sample[-1]) + 1 if len(place) else 0), SHAPE_START, np.int64)
        stream[place] = item_of
        # Of free tokens in a row the last one is an item of the shapes after it.
        ended = (stream >= 0) | (stream == SHAPE_START)
        ended[:-1] |= stream[1:] >= 0
        self._items, self._places = stream, np.flatnonzero(ended)
        #: How many such items stand before the newest one.
        self._older = (np.cumsum(ended) - ended)[place - 1]

    def numbered(self, is_shape: bool) -> Iterator[tuple[IntArray, IntArray]]:
        """Number the contexts of 1 item, of 2, up to `MAX_CONTEXT`, while there are any: for each length the
        number of the context before each position, [N], -1 for none; and one position of each context, [C]."""
        context = np.zeros(len(self.tokens), dtype=np.int64)
        for n in range(MAX_CONTEXT):
            item, found = self._item(is_shape, np.arange(len(context)), n)
            where = np.flatnonzero((context >= 0) & found)
            if not len(where):
                return
            longer = context[where] << 32 | (item[where] - SHAPE_START)
            _, first, numbers = np.unique(longer, return_index=True, return_inverse=True)
            context = np.full(len(context), -1, dtype=np.int64)
            context[where] = numbers
            yield context, where[first]

    def contexts(self, is_shape: bool, positions: IntArray, length: int) -> IntArray:
        """[positions, length]: the contexts before these, in reading order."""
        items = [self._item(is_shape, positions, n)[0] for n in range(length)]
        return np.stack(items[::-1], axis=1)

    def _item(self, is_shape: bool, positions: IntArray, n: int) -> tuple[IntArray, BoolArray]:
        """The n-th item before each of these positions, 0 is the newest, and whether there is one."""
        if not is_shape:
            place = positions - 1 - n
            return self.tokens[np.maximum(place, 0)].astype(np.int64), place >= self.begin[positions]
        place = newest = positions + self.sample[positions]  # in the stream
        if n:
            older = self._older[positions] - n
            place = np.where(older >= 0, self._places[np.maximum(older, 0)], -1)
        beginning = self.begin[positions] + self.sample[positions]
        return self._items[np.maximum(place, 0)], (place >= beginning) & (newest - place < SHAPE_WINDOW)


class Followed(NamedTuple):
    """The tokens that follow the C different contexts of one kind and length, over all samples."""

    seen: IntArray  # [C]: occurrences
    token: IntArray  # [C]: the most frequent one, of equal ones the smallest
    hits: IntArray  # [C]: its occurrences
    groups: IntArray  # [C]: groups whose samples agree on this token after this context
    pairs: IntArray  # [pairs] sorted: context << 31 | token
    counts: IntArray  # [pairs]: how often

    def count_of(self, tokens: IntArray) -> IntArray:
        """How often each context is followed by this token; 0 for token -1."""
        wanted = np.arange(len(tokens)) << 31 | np.maximum(tokens, 0)
        place = np.minimum(np.searchsorted(self.pairs, wanted), len(self.pairs) - 1)
        found: IntArray = self.counts[place] * ((self.pairs[place] == wanted) & (tokens >= 0))
        return found


def follow(positions: Positions, context: IntArray, said: IntArray) -> Followed:
    """Count what follows each context; context: [N], as `Positions.numbered` gives them. said: [M, 2]: `_pairs`
    that their groups agree on."""
    at = np.flatnonzero(context >= 0)
    pairs, counts = np.unique(_pairs(positions, context, at)[:, 0], return_counts=True)
    seen = np.bincount(pairs >> 31, counts).astype(np.int64)
    order = np.lexsort((pairs, -counts, pairs >> 31))
    best = order[np.searchsorted((pairs >> 31)[order], np.arange(len(seen)))]
    # A group counts once, however often it says it.
    support = _groups_of(np.searchsorted(pairs, said[:, 0]), said[:, 1], len(pairs))
    return Followed(seen, pairs[best] & 0x7FFFFFFF, counts[best], support[best], pairs, counts)


def _pairs(positions: Positions, context: IntArray, at: IntArray) -> IntArray:
    """[M, 2]: context << 31 | token, and the group, of these positions."""
    return np.stack([context[at] << 31 | positions.tokens[at], positions.group[at]], axis=1)


def agreed(positions: Positions, context: IntArray) -> IntArray:
    """The `_pairs` that the samples of a group agree on: in a column, or wherever the context stands."""
    found = context[positions.determined]
    lowest = np.minimum.reduceat(found, positions.column)
    is_one = (lowest >= 0) & (lowest == np.maximum.reduceat(found, positions.column))
    chosen = positions.determined[positions.column][is_one]
    return np.concatenate([_pairs(positions, context, chosen), _recurring(positions, context)])


def _recurring(positions: Positions, context: IntArray) -> IntArray:
    """Those of contexts that stand in enough samples of a group, which all go on with one token."""
    num_groups, num_samples = len(positions.recurring), int(positions.sample[-1]) + 1
    at = np.flatnonzero((context >= 0) & (positions.recurring[positions.group] <= num_samples))
    if not len(at):
        return np.zeros((0, 2), dtype=np.int64)
    # Sorted by context, then by group: in how many samples it stands, and what follows.
    group_of = np.zeros(num_samples, dtype=np.int64)
    group_of[positions.sample] = positions.group
    in_sample = np.unique(context[at] * num_samples + positions.sample[at])
    places, samples = np.unique(
        in_sample // num_samples * num_groups + group_of[in_sample % num_samples], return_counts=True
    )
    place, token = context[at] * num_groups + positions.group[at], positions.tokens[at]
    order = np.lexsort((token, place))
    new = np.flatnonzero(np.diff(place[order], prepend=-1))
    following = token[order]
    alike = np.minimum.reduceat(following, new) == np.maximum.reduceat(following, new)
    right = alike & (samples >= positions.recurring[places % num_groups])
    said = places[right] // num_groups << 31 | following[new][right]
    return np.stack([said, places[right] % num_groups], axis=1)


def _candidates(positions: Positions, kept: IntArray, min_groups: int) -> Iterator[tuple[Observed, bool]]:
    """Entries that may be kept: certain ones, and those that take a shorter context back; shapes first, by length.
    With each, whether it is *new*: whether it says something that no shorter context says."""
    for is_shape in (True, False):
        # What the longest shorter context that is new says at each position, and how certain it is.
        said = np.full(len(positions.tokens), -1, dtype=np.int64)
        share = np.zeros(len(said))
        for length, (context, first) in enumerate(positions.numbered(is_shape), start=1):
            followed = follow(positions, context, agreed(positions, context))
            own = followed.hits / followed.seen
            certain = (followed.groups >= min_groups) & (followed.hits >= CERTAIN * followed.seen)
            before, sure = said[first], share[first]
            right = followed.count_of(before)
            blocks = ~certain & (before >= 0) & (followed.seen >= 2) & (right < BLOCKED * followed.seen)
            new = blocks | (certain & ((before != followed.token) | (own - sure > SAME)))
            token, hits = np.where(certain, followed.token, -1), np.where(certain, followed.hits, right)
            at = np.flatnonzero(context >= 0)
            at = at[new[context[at]]]
            said[at], share[at] = token[context[at]], own[context[at]]
            rows = np.flatnonzero(certain | blocks)
            items = positions.contexts(is_shape, first[rows], length)
            if not is_shape:
                # Of kept tokens alone a shape says the same, and where more is known, a longer shape says more.
                free = (~np.isin(items, kept)).any(axis=1)
                rows, items = rows[free], items[free]
            fields = (token, hits, followed.seen, followed.groups, new)
            columns_of = [field[rows].tolist() for field in fields]
            for one, *counts, is_new in zip(items.tolist(), *columns_of, strict=True):
                yield Observed(is_shape, tuple(one), *counts), is_new


def _chosen(candidates: Sequence[tuple[Observed, bool]], chains: Chains) -> Iterator[Observed]:
    """Keep new entries, and those that say the same as a shorter context but make a longer run."""
    runs: dict[tuple[bool, tuple[int, ...]], int] = {}
    for entry, new in candidates:
        is_shape, context = entry.is_shape, entry.context
        own = len(chains.run(is_shape, context)[0])
        shorter = ((is_shape, context[i:]) for i in range(1, len(context)))
        known = next((runs[key] for key in shorter if key in runs), 0)
        if new or (own - known) * entry.seen >= LONGER:
            runs[is_shape, context] = own
            yield entry
