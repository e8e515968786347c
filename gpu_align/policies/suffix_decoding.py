"""Arctic's suffix decoding, as vLLM drives it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any

from gpu_align.errors import MissingExtraError
from gpu_align.policies._sequence import SequencePolicy, check_count

#: The id of the request that is being drafted for.
_REQUEST = 0


class SuffixDecoding(SequencePolicy):
    """Drafts from a suffix tree over prompt, prediction and output; the tree is Arctic's own code.

    ::

        tree = all suffixes of (prompt + prediction + output), cut to max_tree_depth
        for m in 1, 2, …:                                    # the last m tokens, as long as the tree has them
            path(m) = from there on always the most frequent next token, while
                      its estimated probability along the path is >= min_token_prob and
                      len(path) < min(K, max_spec_factor * m)
            score(m) = sum of the estimated probabilities along path(m)
        return the path of highest score, the longer match where scores are equal

    The prediction goes where a user of vLLM would put it: at the end of the prompt. The tree of earlier responses
    holds those of `earlier`, and is off without them, as every output is replayed once. It is asked as well, and
    the draft of higher score is taken, the request's own where scores are equal. What is replayed does not enter
    it: a draft would depend on what was replayed before.

    Args:
        max_spec_factor: drafts for each token of matched suffix; ``>= 0``. vLLM's default is 1.
        max_tree_depth: match and draft together are no longer; ``>= 1``. vLLM's default is 24, which caps drafts
            far below K = 64; 64 is Arctic's own.
        min_token_prob: vLLM's default is 0.1.
        name: the name in reports.
        earlier: an `EarlierResponses` of the same depth.

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
        draft = self._speculate(self._cache)
        if self._earlier is not None:
            other = self._speculate(self._earlier.cache)
            draft = draft if draft.score >= other.score else other
        return list(draft.token_ids)

    def _speculate(self, cache: Any) -> Any:
        return cache.speculate(
            _REQUEST,
            self._tail,
            max_spec_tokens=self._num_draft_tokens,
            max_spec_factor=self._max_spec_factor,
            min_token_prob=self._min_token_prob,
        )


class EarlierResponses:
    """Arctic's tree of earlier responses, filled once and then only asked; any number of policies may share it.

    Args:
        responses: token ids of each.
        max_tree_depth: as in `SuffixDecoding`.

    Raises:
        MissingExtraError: arctic-inference cannot be imported.
    """

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
    """A new ``SuffixDecodingCache``; without a tree of earlier responses if it is to keep none of them."""
    try:
        # By name: no type checker will find it, as it is a dependency of nothing.
        module: Any = importlib.import_module("arctic_inference.suffix_decoding")
    except ImportError as error:
        # No extra has arctic-inference, because it would bring an engine of its own.
        how = "In a checkout: python -m benchmarks.quality.build_suffix_peer, then PYTHONPATH=.cache/suffix_peer"
        tree = "the suffix tree of arctic-inference"
        raise MissingExtraError("the suffix_decoding policy", tree, how=how) from error
    return module.SuffixDecodingCache(max_tree_depth, max_cached_requests=max_cached_requests)
