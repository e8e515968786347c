"""Drafters that look the last tokens up: in the texts, in a suffix tree, or in a table of recipes."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...errors import MissingExtraError
from ...predictors.base import check_count
from ...predictors.input_lookup import InputLookupTokenPredictor
from .base import Policy

if TYPE_CHECKING:
    from ...ops.recipe_lookup import Recipes

Tie = Literal["latest", "earliest"]


class PromptLookup(Policy):
    """N-gram lookup over prompt, prediction and output as one text.

    ::

        text = prompt + prediction + output
        for n in pattern_max, …, pattern_min:
            ends = [e for e in range(n, len(text) - prediction_min + 1) if text[e - n : e] == text[-n:]]
            if ends:
                e = max(ends) if tie == "latest" else min(ends)
                return text[e : e + min(prediction_max, K)]
        return []

    An occurrence may overlap the pattern, and a draft may run from the prediction on into the output. All
    limits are at least 1; ``prediction_max=None`` leaves that of a draft to K.

    Cost: ``pattern_max - pattern_min + 1`` dictionary entries a token, whatever the length of the text.

    Source: A. Saxena, "Prompt Lookup Decoding", https://github.com/apoorvumang/prompt-lookup-decoding.
    """

    def __init__(
        self,
        pattern_min: int = 2,
        pattern_max: int = 5,
        prediction_min: int = 1,
        prediction_max: int | None = None,
        tie: Tie = "latest",
        name: str = "prompt_lookup",
    ) -> None:
        super().__init__(name)
        self._pattern_min = check_count("pattern_min", pattern_min)
        self._pattern_max = check_count("pattern_max", pattern_max, self._pattern_min)
        self._prediction_min = check_count("prediction_min", prediction_min)
        longest = sys.maxsize if prediction_max is None else prediction_max
        self._prediction_max = check_count("prediction_max", longest, self._prediction_min)
        if tie not in ("latest", "earliest"):
            raise ValueError(f"tie: expected 'latest' or 'earliest', got {tie!r}")
        self._keep_first = tie == "earliest"

    def _begin(self) -> None:
        self._text: list[int] = []
        self._indexed = 0
        self._ends: dict[tuple[int, ...], int] = {}
        self._advance(self._prompt + self._prediction)

    def _advance(self, tokens: list[int]) -> None:
        text, ends = self._text, self._ends
        text.extend(tokens)
        # An n-gram enters the index once enough tokens follow it; so the pattern never finds itself.
        while self._indexed + 1 + self._prediction_min <= len(text):
            self._indexed += 1
            end = self._indexed
            for n in range(self._pattern_min, min(self._pattern_max, end) + 1):
                key = tuple(text[end - n : end])
                if not (self._keep_first and key in ends):
                    ends[key] = end

    def _draft(self) -> list[int]:
        text = self._text
        length = min(self._num_draft_tokens, self._prediction_max)
        for n in range(min(self._pattern_max, len(text)), self._pattern_min - 1, -1):
            end = self._ends.get(tuple(text[-n:]))
            if end is not None:
                return text[end : end + length]
        return []


def prompt_lookup_vllm(
    pattern_min: int = 5, pattern_max: int = 5, name: str = "prompt_lookup_vllm"
) -> PromptLookup:
    """vLLM's ``ngram`` method on the V1 runner, with its defaults or another window.

    ``prompt_lookup_min`` and ``prompt_lookup_max`` are both 5 when a user sets neither; the earliest of
    several longest matches is taken. Source: ``vllm/v1/spec_decode/ngram_proposer.py`` and
    ``vllm/config/speculative.py``, 0.32.0.
    """
    return PromptLookup(pattern_min, pattern_max, tie="earliest", name=name)


def prompt_lookup_vllm_v2(
    pattern_min: int = 5, pattern_max: int = 5, name: str = "prompt_lookup_vllm_v2"
) -> PromptLookup:
    """vLLM's ``ngram`` method on the V2 runner: as on V1, but the *latest* match is taken.

    The kernel fills draft slots that it has nothing for with the last sampled token; those are not part of
    this policy. Source: ``vllm/v1/worker/gpu/spec_decode/ngram``, 0.32.0.
    """
    return PromptLookup(pattern_min, pattern_max, tie="latest", name=name)


def prompt_lookup_transformers() -> PromptLookup:
    """``PromptLookupCandidateGenerator`` of transformers, with its defaults.

    Patterns of 2 tokens, then 1; the earliest match; at most 10 draft tokens. Source:
    ``transformers/generation/candidate_generator.py``, 5.x.
    """
    return PromptLookup(1, 2, prediction_max=10, tie="earliest", name="prompt_lookup_transformers")


class InputLookup(Policy):
    """Longest-suffix lookup in the input, and then along the match as long as it holds.

    An `InputLookupTokenPredictor`, whose docstring has the rule: the input is ``prompt + prediction`` and never
    grows, the state is the input followed by the output.

    Args:
        pattern_min: shortest suffix that counts as a match; ``>= 1``.
        pattern_max: longest suffix that is told apart, ``None``: any. What runs in the original by default is 1.
        prediction_min: fewest tokens a new match must be able to draft; ``>= 1``.
        prediction_max: most tokens drafted a step; raised to ``pattern_min``, as in the original.

    Source: https://github.com/withcatai/node-llama-cpp,
    ``src/evaluator/LlamaContext/tokenPredictors/InputLookupTokenPredictor.ts``.
    """

    def __init__(
        self,
        pattern_min: int = 1,
        pattern_max: int | None = 1,
        prediction_min: int = 1,
        prediction_max: int = 3,
        name: str = "input_lookup_node_llama_cpp",
    ) -> None:
        super().__init__(name)
        shortest = check_count("pattern_min", pattern_min)
        longest = sys.maxsize if pattern_max is None else check_count("pattern_max", pattern_max, shortest)
        self._lookup = InputLookupTokenPredictor((shortest, longest), (prediction_min, prediction_max))

    def _begin(self) -> None:
        text = self._prompt + self._prediction
        self._lookup.update_input_tokens(text)
        self._lookup.reset(text, self.options)

    def _draft(self) -> list[int]:
        return self._lookup.predict_tokens()

    def _advance(self, tokens: list[int]) -> None:
        self._lookup.push_tokens(tokens)


#: The id of the request that is being drafted for.
_REQUEST = 0


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

    A tree of `EarlierResponses` of the same depth is asked as well where there is one, and the draft of higher
    score is taken, the request's own where scores are equal. What is replayed does not enter it: a draft would
    depend on what was replayed before.

    Args:
        max_spec_factor: drafts for each token of matched suffix; ``>= 0``. vLLM's default is 1.
        max_tree_depth: match and draft together are no longer; ``>= 1``. 24 in vLLM, 64 in Arctic's own code.
        min_token_prob: vLLM's default is 0.1.

    Raises:
        MissingExtraError: arctic-inference cannot be imported.

    Source: G. Oliaro et al., "SuffixDecoding", https://arxiv.org/abs/2411.04975; arctic-inference 0.3.0,
    ``arctic_inference/suffix_decoding``; vLLM 0.32.0, ``vllm/v1/spec_decode/suffix_decoding.py``.
    """

    def __init__(
        self,
        max_spec_factor: float = 1.0,
        max_tree_depth: int = 64,
        min_token_prob: float = 0.1,
        name: str = "suffix_decoding",
        earlier: EarlierResponses | None = None,
    ) -> None:
        super().__init__(name)
        if not max_spec_factor >= 0:
            raise ValueError(f"max_spec_factor: expected a number >= 0, got {max_spec_factor}")
        if not 0 <= min_token_prob <= 1:
            raise ValueError(f"min_token_prob: expected 0 <= p <= 1, got {min_token_prob}")
        self._max_spec_factor = float(max_spec_factor)
        self._min_token_prob = float(min_token_prob)
        self._max_tree_depth = check_count("max_tree_depth", max_tree_depth)
        if earlier is not None and earlier.max_tree_depth != self._max_tree_depth:
            raise ValueError(
                f"earlier: expected a tree of depth {self._max_tree_depth}, got one of {earlier.max_tree_depth}"
            )
        self._earlier = earlier
        self._cache = _cache(self._max_tree_depth)

    def _begin(self) -> None:
        for request in list(self._cache.active_requests):
            self._cache.stop_request(request)
        self._cache.start_request(_REQUEST, self._prompt + self._prediction)
        self._tail = (self._prompt + self._prediction)[-self._max_tree_depth :]

    def _advance(self, tokens: list[int]) -> None:
        self._cache.add_active_response(_REQUEST, tokens)
        self._tail = (self._tail + tokens)[-self._max_tree_depth :]

    def _draft(self) -> list[int]:
        drafts = [
            cache.speculate(
                _REQUEST,
                self._tail,
                max_spec_tokens=self._num_draft_tokens,
                max_spec_factor=self._max_spec_factor,
                min_token_prob=self._min_token_prob,
            )
            for cache in (self._cache, *([] if self._earlier is None else [self._earlier.cache]))
        ]
        # Of equal scores, max takes the first.
        return list(max(drafts, key=lambda draft: draft.score).token_ids)


class EarlierResponses:
    """Arctic's tree of earlier responses, filled once and then only asked; any number of policies may share it."""

    def __init__(self, responses: Iterable[Sequence[int]], max_tree_depth: int = 64) -> None:
        self.max_tree_depth = max_tree_depth
        self.cache = _cache(max_tree_depth, max_cached_requests=-1)
        for number, tokens in enumerate(responses, start=_REQUEST + 1):
            self.cache.start_request(number, [])
            self.cache.add_active_response(number, list(tokens))
            self.cache.stop_request(number)
        # Whoever asks does so in the name of a request; this one has neither a prompt nor a response.
        self.cache.start_request(_REQUEST, [])


def suffix_decoding_available() -> bool:
    """Whether arctic-inference's suffix decoding can be imported; nothing is imported to find out."""
    try:
        return importlib.util.find_spec("arctic_inference.suffix_decoding") is not None
    except ModuleNotFoundError:
        return False


def _cache(max_tree_depth: int, max_cached_requests: int = 0) -> Any:
    """A new ``SuffixDecodingCache``; without a tree of earlier responses if it is to keep none."""
    try:
        # By name: no type checker will find it, as it is a dependency of nothing.
        module: Any = importlib.import_module("arctic_inference.suffix_decoding")
    except ImportError as error:
        # No extra has arctic-inference, because it would bring an engine of its own.
        how = "In a checkout: python -m benchmarks.quality.build_suffix_peer, then PYTHONPATH=.cache/suffix_peer"
        tree = "the suffix tree of arctic-inference"
        raise MissingExtraError("the suffix_decoding policy", tree, how=how) from error
    return module.SuffixDecodingCache(max_tree_depth, max_cached_requests=max_cached_requests)


class RecipeLookup(Policy):
    """A lookup table and nothing else: the prediction is not used.

    ::

        tokens = prompt + output
        for n in longest context, …, 1:                  # the last n tokens
            if tokens[-n:] has a recipe:
                return its continuation, as far as survival >= min_survival

    The longest context decides, also where its continuation is empty or not likely enough. min_survival: 0 to 1.

    Cost: one dictionary probe for each length of a context, a step.

    Source: "Recipe speculative decoding", https://kolm.ai/articles/speculative-decoding-recipes. Its packs are
    collected from what a model writes and are not published; ours are learned from texts.
    """

    def __init__(self, recipes: Recipes, min_survival: float = 0.2, name: str = "recipe_pack") -> None:
        super().__init__(name)
        if not 0 <= min_survival <= 1:
            raise ValueError(f"min_survival: expected 0 <= p <= 1, got {min_survival}")
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
