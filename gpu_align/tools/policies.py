"""Single-sequence drafters that others published, as baselines for the simulator.

``POLICIES`` maps the name on the command line to a factory that takes no argument, ``OPTIONAL_POLICIES`` those
that need a package which the core does not, and ``RECIPE_POLICIES`` those whose factory takes the recipes to draft
from. Policies run on plain Python lists and never import torch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..ops.errors import MissingExtraError, check_int, check_probability
from ..predictors.base import PredictorOptions, TokenPredictor
from ..predictors.input_lookup import InputLookupTokenPredictor

if TYPE_CHECKING:
    from ..ops.recipes.table import Recipes

__all__ = [
    "OPTIONAL_POLICIES", "POLICIES", "RECIPE_POLICIES", "Cursor", "Myers",
    "OpenAI", "Policy", "PromptLookup", "RecipeLookup", "StaticText", "SuffixDecoding", "guess_line_end",
    "prompt_lookup_transformers", "prompt_lookup_vllm", "prompt_lookup_vllm_v2",
    "suffix_decoding_available",
]  # fmt: skip


class Policy(TokenPredictor):
    """A published drafter: a `TokenPredictor` over plain lists.

    A subclass writes `_begin`, `_draft` and `_advance`, which find what was given in `_prompt`, `_prediction`,
    `_output` and `_num_draft_tokens`, K.
    """

    def reset(self, state_tokens: Sequence[int], options: PredictorOptions) -> None:
        super().reset(state_tokens, options)
        self._prompt, self._prediction = list(state_tokens), list(options.prediction)
        self._num_draft_tokens = options.num_draft_tokens
        self._output: list[int] = []
        self._begin()

    def predict_tokens(self) -> list[int]:
        self._check_disposed()
        return self._draft()[: self._num_draft_tokens]

    def push_tokens(self, tokens: Sequence[int]) -> None:
        super().push_tokens(tokens)
        new = list(tokens)
        self._output += new
        self._advance(new)

    def _begin(self) -> None:
        """Reset the state; prompt, prediction and K are set, the output is empty."""

    def _draft(self) -> list[int]:
        """They are cut to K."""
        raise NotImplementedError

    def _advance(self, tokens: list[int]) -> None:
        """Take one step's tokens; `self._output` ends in them already."""


class Cursor(Policy):
    """The simplest predicted output: one cursor, no realignment.

    ::

        cursor = 0
        each step:  draft = prediction[cursor : cursor + K]
                    cursor += 1 for each new token that equals prediction[cursor]
                    at the first that does not: stop drafting for the rest of the sequence

    A token beyond the end of the prediction counts as a mismatch.

    Source: every published scheme improves on this one; vLLM's pull request 23450 ("Add
    Predicted Outputs API", 2025) and a static draft without realignment behave like it.
    """

    name = "cursor"
    _cursor: int | None  # None: nothing is drafted

    def _begin(self) -> None:
        self._cursor = 0

    def _draft(self) -> list[int]:
        return [] if self._cursor is None else self._prediction[self._cursor :][: self._num_draft_tokens]

    def _advance(self, tokens: list[int]) -> None:
        if self._cursor is not None:
            end = self._cursor + len(tokens)
            self._cursor = end if self._prediction[self._cursor : end] == tokens else None


#: Mean tokens a line that `guess_line_end` aims at: Python source in Tekken tokens has 10.0.
GUESSED_LINE_LENGTH = 10


class StaticText(Cursor):
    """Follow the prediction; when diverged, align whole lines each time a line is completed.

    A line is a run of tokens up to and including one for which ``ends_line`` is true. ::

        cursor = 0
        each step:
            if the new tokens are prediction[cursor : cursor + n]: cursor += n
            else: diverged, until an attempt succeeds
            if diverged and a line was completed since the last attempt:
                align all completed output lines with the lines of the prediction, by a longest common subsequence
                if the last completed line is matched, to prediction line i,
                and the tokens since then are a prefix of line i + 1 without its line end:
                    cursor = that position in line i + 1
            draft = prediction[cursor : cursor + K] unless diverged

    ends_line: says of a token id whether its text contains a newline; None, when no tokenizer is known, stands for
    `guess_line_end`.

    Source: https://github.com/cascade-tech-ai/vllmx, ``vllm/v1/spec_decode/static_text_proposer.py``; its
    switch between CR/LF and LF predictions is left out because token ids do not say which is which.
    """

    name = "static_text"

    def __init__(self, ends_line: Callable[[int], bool] | None = None) -> None:
        if ends_line is not None and not callable(ends_line):
            raise TypeError(f"ends_line: expected a callable or None, got {type(ends_line).__name__}")
        self._is_line_end = functools.cache(guess_line_end if ends_line is None else ends_line)

    def _begin(self) -> None:
        super()._begin()
        self._lines: list[list[int]] = [[]]
        self._line_starts = [0]
        for position, token in enumerate(self._prediction):
            self._lines[-1].append(token)
            if self._is_line_end(token):
                self._lines.append([])
                self._line_starts.append(position + 1)
        # Of each different line, as bits, where the prediction has it.
        self._places: dict[tuple[int, ...], int] = {}
        for number, line in enumerate(self._lines):
            self._places[tuple(line)] = self._places.get(tuple(line), 0) | 1 << number
        # Bit i is 0 where line i makes the LCS with the completed lines longer; and before the last of them.
        self._row = self._row_before = self._all_lines = (1 << len(self._lines)) - 1
        self._current: list[int] = []
        self._may_attempt = False

    def _advance(self, tokens: list[int]) -> None:
        for token in tokens:
            self._current.append(token)
            if self._is_line_end(token):
                self._row_before = self._row
                equal = self._row & self._places.get(tuple(self._current), 0)
                self._row = ((self._row + equal) | (self._row - equal)) & self._all_lines
                self._current = []
                self._may_attempt = True
        super()._advance(tokens)
        if self._cursor is None and self._may_attempt:
            self._cursor = self._attempt()
            self._may_attempt = False

    def _attempt(self) -> int | None:
        # The first lines that have the whole LCS; their last one is matched to the last completed line, unless
        # they have it without that, too.
        num = (~self._row & self._all_lines).bit_length()
        if not num or not self._row_before >> (num - 1) & 1:
            return None
        following = self._lines[num]
        body = following[:-1] if following and self._is_line_end(following[-1]) else following
        if body[: len(self._current)] != self._current:
            return None
        return self._line_starts[num] + len(self._current)


def guess_line_end(token: int) -> bool:
    """Stands in for a tokenizer: one token id in `GUESSED_LINE_LENGTH` ends a "line", by Knuth's hash.

    Equal stretches of prediction and output are then cut alike, which is all that the alignment needs.
    """
    return ((token * 2654435761) & 0xFFFFFFFF) * GUESSED_LINE_LENGTH < 1 << 32


class OpenAI(Policy):
    """Short lookahead, and a long wait after each divergence.

    ::

        aligned:   draft = prediction[cursor : cursor + min(lookahead, K)]
        diverged:  draft nothing until the last `resume_after` output tokens, all of them generated after
                   the token that diverged, occur in the prediction; cursor = where that occurrence ends

    Several occurrences: the first that ends after the cursor's position at the divergence, else the last before.

    lookahead: most tokens drafted a step; one divergence rejects at most so many. resume_after: matching tokens
    needed to draft again. Published are about 32, and counts that 35 gives; see docs/published.md.
    Source: https://vamvas.ch/openai-predicted-outputs (lookahead, resumption and the 58-token example).
    """

    name = "openai"

    def __init__(self, lookahead: int = 16, resume_after: int = 32) -> None:
        self._lookahead = check_int("lookahead", lookahead, 1)
        self._resume_after = check_int("resume_after", resume_after, 1)

    def _begin(self) -> None:
        self._cursor = 0
        self._aligned = True
        self._since_divergence = 0
        self._window_ends: dict[tuple[int, ...], list[int]] | None = None

    def _draft(self) -> list[int]:
        return self._prediction[self._cursor : self._cursor + self._lookahead] if self._aligned else []

    def _advance(self, tokens: list[int]) -> None:
        for position in range(len(self._output) - len(tokens), len(self._output)):
            self._pass(position)

    def _pass(self, position: int) -> None:
        """Move past the output token at `position`."""
        if self._aligned:
            if self._prediction[self._cursor : self._cursor + 1] == [self._output[position]]:
                self._cursor += 1
            else:
                self._aligned = False
                self._since_divergence = 0
            return
        self._since_divergence += 1
        if self._since_divergence < self._resume_after:
            return
        ends = self._ends_of(self._output[position + 1 - self._resume_after : position + 1])
        if ends:
            self._cursor = next((end for end in ends if end > self._cursor), ends[-1])
            self._aligned = True

    def _ends_of(self, window: list[int]) -> list[int]:
        """Ascending positions of the prediction right after each occurrence of ``window``."""
        if self._window_ends is None:
            self._window_ends = {}
            for end in range(self._resume_after, len(self._prediction) + 1):
                key = tuple(self._prediction[end - self._resume_after : end])
                self._window_ends.setdefault(key, []).append(end)
        return self._window_ends.get(tuple(window), [])


class Myers(Cursor):
    """Cursor at the end of the shortest edit script from the prediction to the output so far.

    ::

        d      = min over x of dist(prediction[:x], output)        # insertions + deletions
        cursor = the largest x with dist(prediction[:x], output) == d
                 and prediction[x - 1] == output[-1]               # the script ends in a match
        draft  = prediction[cursor : cursor + K], or nothing if there is no such x

    Before any output the cursor is 0. Coming back after an insertion or a substitution needs one matching token,
    after a deletion of L tokens about L: only then is the jump cheaper than calling all of them inserted. A token
    costs time in proportion to the prediction, 64 of its tokens a machine word.

    Source: https://cascadetech.ai/blog/vllm-predicted-outputs ("we use the Myers diff algorithm to
    realign") and the token-level prototype in https://github.com/cascade-tech-ai/vllmx
    (``cascade/src/smart_prediction/algorithms/myers_streaming.py``), which goes on to longer scripts when
    no shortest one ends in a match; see ``benchmarks/quality/README.md`` for the differences.
    """

    name = "myers"

    def _begin(self) -> None:
        super()._begin()
        positions: dict[int, list[int]] = {}
        for position, token in enumerate(self._prediction):
            positions.setdefault(token, []).append(position)
        self._size = len(self._prediction) // 8 + 1

        def bits_of(token: int) -> bytes:  # where the prediction has it, padded to whole bytes
            bits = bytearray(self._size)
            for position in positions.get(token, ()):
                bits[position >> 3] |= 1 << (position & 7)
            return bytes(bits)

        self._bits_of = functools.lru_cache(maxsize=256)(bits_of)  # of all tokens they would take gigabytes
        # Bit i is 0 where prediction[i] makes the LCS with the output longer, as in `StaticText`.
        self._row = self._all = (1 << 8 * self._size) - 1

    def _advance(self, tokens: list[int]) -> None:
        for token in tokens:
            equal = self._row & int.from_bytes(self._bits_of(token), "little")
            self._row = ((self._row + equal) | (self._row - equal)) & self._all
        # dist(prediction[:x], output) is the output's length, plus 1 for each set one of x bits, minus 1 for each
        # other. Of each byte: where in it that is smallest.
        row = np.frombuffer(self._row.to_bytes(self._size, "little"), dtype=np.uint8)
        ends = np.cumsum(_BYTE_SUM[row], dtype=np.int64)
        lowest = ends - _BYTE_SUM[row] + _BYTE_MIN[row]
        at = _BYTE_AT_MIN[row] & np.frombuffer(self._bits_of(tokens[-1]), dtype=np.uint8)
        found = np.flatnonzero((lowest == min(0, lowest.min())) & (at > 0))
        self._cursor = int(found[-1]) * 8 + int(at[found[-1]]).bit_length() if len(found) else None


#: [256], of the sums of 1, 2, … 8 bits of a byte (set 1, other -1): the last, the least, where that is (bits).
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_SUMS = np.cumsum(2 * _BITS.astype(np.int8) - 1, axis=1)
_BYTE_SUM, _BYTE_MIN = _SUMS[:, -1], _SUMS.min(axis=1)
_BYTE_AT_MIN = np.packbits(_BYTE_MIN[:, None] == _SUMS, axis=1, bitorder="little")[:, 0]


Tie = Literal["latest", "earliest"]


class PromptLookup(Policy):
    """N-gram lookup over prompt, prediction and output as one text.

    ::

        text = prompt + prediction + output
        for n in pattern_max, …, pattern_min:
            ends = [e for e in range(n, len(text)) if text[e - n : e] == text[-n:]]
            if ends:
                e = max(ends) if tie == "latest" else min(ends)
                return text[e : e + min(prediction_max, K)]
        return []

    An occurrence may overlap the pattern, and a draft may run from the prediction on into the output. All
    limits are at least 1; ``prediction_max=None`` leaves that of a draft to K.

    Source: A. Saxena, "Prompt Lookup Decoding", https://github.com/apoorvumang/prompt-lookup-decoding.
    """

    name = "prompt_lookup"

    def __init__(
        self,
        pattern_min: int = 2,
        pattern_max: int = 5,
        prediction_max: int | None = None,
        tie: Tie = "latest",
    ) -> None:
        self._pattern_min = check_int("pattern_min", pattern_min, 1)
        self._pattern_max = check_int("pattern_max", pattern_max, self._pattern_min)
        longest = sys.maxsize if prediction_max is None else prediction_max
        self._prediction_max = check_int("prediction_max", longest, 1)
        if tie not in ("latest", "earliest"):
            raise ValueError(f"tie: expected 'latest' or 'earliest', got {tie!r}")
        self._keep_first = tie == "earliest"

    def _begin(self) -> None:
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._advance(self._prompt + self._prediction)

    def _advance(self, tokens: list[int]) -> None:
        text, ends = self._text, self._ends
        text.extend(tokens)
        # An n-gram enters the index once a token follows it; so the pattern never finds itself.
        for end in range(max(len(text) - len(tokens), 1), len(text)):
            for n in range(self._pattern_min, min(self._pattern_max, end) + 1):
                key = tuple(text[end - n : end])
                if not (self._keep_first and key in ends):
                    ends[key] = end

    def _draft(self) -> list[int]:
        text, length = self._text, min(self._num_draft_tokens, self._prediction_max)
        for n in range(min(self._pattern_max, len(text)), self._pattern_min - 1, -1):
            end = self._ends.get(tuple(text[-n:]))
            if end is not None:
                return text[end : end + length]
        return []


def prompt_lookup_vllm(pattern_min: int = 5, pattern_max: int = 5) -> PromptLookup:
    """vLLM's ``ngram`` method on the V1 runner, with its defaults or another window.

    ``prompt_lookup_min`` and ``prompt_lookup_max`` are both 5 when a user sets neither; the earliest of
    several longest matches is taken. Source: ``vllm/v1/spec_decode/ngram_proposer.py`` and
    ``vllm/config/speculative.py``, 0.32.0.
    """
    return PromptLookup(pattern_min, pattern_max, tie="earliest")


def prompt_lookup_vllm_v2(pattern_min: int = 5, pattern_max: int = 5) -> PromptLookup:
    """vLLM's ``ngram`` method on the V2 runner: as on V1, but the *latest* match is taken.

    The kernel fills draft slots that it has nothing for with the last sampled token; those are not part of
    this policy. Source: ``vllm/v1/worker/gpu/spec_decode/ngram``, 0.32.0.
    """
    return PromptLookup(pattern_min, pattern_max, tie="latest")


def prompt_lookup_transformers() -> PromptLookup:
    """``PromptLookupCandidateGenerator`` of transformers, with its defaults.

    Patterns of 2 tokens, then 1; the earliest match; at most 10 draft tokens. Source:
    ``transformers/generation/candidate_generator.py``, 5.x.
    """
    return PromptLookup(1, 2, prediction_max=10, tie="earliest")


#: The id of the request that is being drafted for.
REQUEST = 0


class SuffixDecoding(Policy):
    """Drafts from a suffix tree over prompt, prediction and output; the tree is Arctic's own code.

    ::

        tree = all suffixes of (prompt + prediction + output), cut to max_tree_depth
        for m in 1, 2, …:                                    # the last m tokens, as long as the tree has them
            path(m) = from there on always the most frequent next token, while
                      its estimated probability along the path is >= min_token_prob and
                      len(path) < min(K, max_spec_factor * m)
            score(m) = sum of the estimated probabilities along path(m)
        return the path of highest score, the longer match where scores are equal

    max_spec_factor: drafts for each token of matched suffix; ``>= 0``. vLLM's default is 1. max_tree_depth: match
    and draft together are no longer; ``>= 1``. 24 in vLLM, 64 in Arctic's own code. min_token_prob: vLLM's default
    is 0.1. MissingExtraError: arctic-inference cannot be imported.

    Source: G. Oliaro et al., "SuffixDecoding", https://arxiv.org/abs/2411.04975; arctic-inference 0.3.0,
    ``arctic_inference/suffix_decoding``; vLLM 0.32.0, ``vllm/v1/spec_decode/suffix_decoding.py``.
    """

    name = "suffix_decoding"

    def __init__(
        self, max_spec_factor: float = 1.0, max_tree_depth: int = 64, min_token_prob: float = 0.1
    ) -> None:
        if not max_spec_factor >= 0:
            raise ValueError(f"max_spec_factor: expected a number >= 0, got {max_spec_factor}")
        check_probability("min_token_prob", min_token_prob)
        self._limits = {"max_spec_factor": float(max_spec_factor), "min_token_prob": float(min_token_prob)}
        self._max_tree_depth = check_int("max_tree_depth", max_tree_depth, 1)
        self._cache = suffix_tree(self._max_tree_depth)
        self._trees = [self._cache]

    def _begin(self) -> None:
        for request in list(self._cache.active_requests):
            self._cache.stop_request(request)
        self._cache.start_request(REQUEST, self._prompt + self._prediction)
        self._tail = (self._prompt + self._prediction)[-self._max_tree_depth :]

    def _advance(self, tokens: list[int]) -> None:
        self._cache.add_active_response(REQUEST, tokens)
        self._tail = (self._tail + tokens)[-self._max_tree_depth :]

    def _draft(self) -> list[int]:
        how = {**self._limits, "max_spec_tokens": self._num_draft_tokens}
        drafts = [cache.speculate(REQUEST, self._tail, **how) for cache in self._trees]
        # Of equal scores, max takes the first.
        return list(max(drafts, key=lambda draft: draft.score).token_ids)


def suffix_decoding_available() -> bool:
    """Whether arctic-inference's suffix decoding can be imported; nothing is imported to find out."""
    try:
        return importlib.util.find_spec("arctic_inference.suffix_decoding") is not None
    except ModuleNotFoundError:
        return False


def suffix_tree(max_tree_depth: int, max_cached_requests: int = 0) -> Any:
    """A new ``SuffixDecodingCache``; by default it keeps no earlier responses."""
    try:
        module: Any = importlib.import_module("arctic_inference.suffix_decoding")
    except ImportError as error:
        # No extra has arctic-inference, because it would bring an engine of its own.
        how = "In a checkout: python -m benchmarks.quality.build_suffix_peer, then PYTHONPATH=.cache/suffix_peer"
        what = "the suffix_decoding policy", "the suffix tree of arctic-inference"
        raise MissingExtraError(*what, how=how) from error
    return module.SuffixDecodingCache(max_tree_depth, max_cached_requests=max_cached_requests)


class RecipeLookup(Policy):
    """A lookup table and nothing else: the prediction is not used.

    ::

        tokens = prompt + output
        for n in longest context, …, 1:                  # the last n tokens
            if tokens[-n:] has a recipe:
                return its continuation, as far as survival >= min_survival

    The longest context decides, also where its continuation is empty or not likely enough. min_survival: 0 to 1.

    Source: "Recipe speculative decoding", https://kolm.ai/articles/speculative-decoding-recipes. Its packs are
    collected from what a model writes and are not published; ours are learned from texts.
    """

    name = "recipe_pack"

    def __init__(self, recipes: Recipes, min_survival: float = 0.2) -> None:
        check_probability("min_survival", min_survival)
        lengths = (recipes.context >= 0).sum(axis=1)
        likely = (recipes.token_ids >= 0) & (recipes.survival >= min_survival)
        drafts = np.cumprod(likely, axis=1).sum(axis=1)
        # The context in reading order -> what to draft.
        self._continuations: dict[tuple[int, ...], list[int]] = {}
        contexts, continuations = recipes.context.tolist(), recipes.token_ids.tolist()
        for context, length, tokens, count in zip(contexts, lengths, continuations, drafts, strict=True):
            self._continuations[tuple(context[length - 1 :: -1])] = tokens[:count]
        self._lengths = sorted(set(lengths.tolist()), reverse=True)
        self._longest = max(self._lengths, default=1)

    def _begin(self) -> None:
        self._tail = self._prompt[-self._longest :]

    def _advance(self, tokens: list[int]) -> None:
        self._tail = (self._tail + tokens)[-self._longest :]

    def _draft(self) -> list[int]:
        contexts = (tuple(self._tail[-length:]) for length in self._lengths)
        found = next((context for context in contexts if context in self._continuations), None)
        return [] if found is None else list(self._continuations[found])


#: Command-line name -> a new policy with its published defaults.
POLICIES: dict[str, Callable[[], TokenPredictor]] = {
    "cursor": Cursor,
    "openai": OpenAI,
    "static_text": StaticText,
    "myers": Myers,
    "prompt_lookup": PromptLookup,
    "prompt_lookup_vllm": prompt_lookup_vllm,
    "prompt_lookup_vllm_2_5": partial(prompt_lookup_vllm, 2, 5),
    "prompt_lookup_vllm_1_3": partial(prompt_lookup_vllm, 1, 3),
    "prompt_lookup_vllm_v2": prompt_lookup_vllm_v2,
    "prompt_lookup_vllm_v2_1_3": partial(prompt_lookup_vllm_v2, 1, 3),
    "prompt_lookup_transformers": prompt_lookup_transformers,
    "input_lookup_node_llama_cpp": InputLookupTokenPredictor,
}

#: The name of suffix decoding -> its spec factor, and the depth of its tree. One of 128 holds a match of 64 tokens
#: and a draft of as many; 24 is vLLM's default.
_SUFFIX_DECODING = {
    "suffix_decoding": (1, 64),
    "suffix_decoding_2": (2, 64),
    "suffix_decoding_4": (4, 64),
    "suffix_decoding_16": (16, 64),
    "suffix_decoding_deep": (1, 128),
    "suffix_decoding_2_deep": (2, 128),
    "suffix_decoding_4_deep": (4, 128),
    "suffix_decoding_16_deep": (16, 128),
    "suffix_decoding_vllm": (1.0, 24),
}

#: The same for policies that use another package; the error that they raise without it says how to get it.
OPTIONAL_POLICIES: dict[str, Callable[[], Policy]] = {
    name: partial(SuffixDecoding, *sizes) for name, sizes in _SUFFIX_DECODING.items()
}

#: The same for policies that draft from recipes, which are tokens of one tokenizer.
RECIPE_POLICIES: dict[str, Callable[[Recipes], Policy]] = {"recipe_pack": RecipeLookup}
