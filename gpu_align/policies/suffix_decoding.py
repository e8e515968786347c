"""Arctic's suffix decoding, as vLLM drives it."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from gpu_align.errors import MissingExtraError
from gpu_align.policies._sequence import SequencePolicy, check_count


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
    is off, as every output is replayed once.

    Args:
        max_spec_factor: drafts for each token of matched suffix; ``>= 0``. vLLM's default is 1.
        max_tree_depth: match and draft together are no longer; ``>= 1``. vLLM's default is 24, which caps drafts
            far below K = 64; 64 is Arctic's own.
        min_token_prob: vLLM's default is 0.1.
        name: the name in reports.

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
    ) -> None:
        super().__init__(name)
        if not max_spec_factor >= 0:
            raise ValueError(f"max_spec_factor: expected a number >= 0, got {max_spec_factor}")
        if not 0 <= min_token_prob <= 1:
            raise ValueError(f"min_token_prob: expected 0 <= p <= 1, got {min_token_prob}")
        self._max_spec_factor = float(max_spec_factor)
        self._min_token_prob = float(min_token_prob)
        self._max_tree_depth = check_count("max_tree_depth", max_tree_depth, minimum=1)
        self._cache = _cache(self._max_tree_depth)

    def _begin(self) -> None:
        for request in list(self._cache.active_requests):
            self._cache.stop_request(request)
        self._cache.start_request(0, self._prompt + self._prediction)
        self._tail = (self._prompt + self._prediction)[-self._max_tree_depth :]

    def _advance(self, tokens: list[int]) -> None:
        self._cache.add_active_response(0, tokens)
        self._tail = (self._tail + tokens)[-self._max_tree_depth :]

    def _draft(self) -> list[int]:
        draft = self._cache.speculate(
            0,
            self._tail,
            max_spec_tokens=self._num_draft_tokens,
            max_spec_factor=self._max_spec_factor,
            min_token_prob=self._min_token_prob,
        )
        return list(draft.token_ids)


def suffix_decoding_available() -> bool:
    """Whether arctic-inference's suffix decoding can be imported; nothing is imported to find out."""
    try:
        return importlib.util.find_spec("arctic_inference.suffix_decoding") is not None
    except ModuleNotFoundError:
        return False


def _cache(max_tree_depth: int) -> Any:
    """A new ``SuffixDecodingCache`` without a tree of earlier responses."""
    try:
        # By name: no type checker will find it, as it is a dependency of nothing.
        module: Any = importlib.import_module("arctic_inference.suffix_decoding")
    except ImportError as error:
        raise MissingSuffixDecodingError() from error
    return module.SuffixDecodingCache(max_tree_depth, max_cached_requests=0)


class MissingSuffixDecodingError(MissingExtraError):
    """arctic-inference is in no extra: it would bring its own engine."""

    def __init__(self) -> None:
        self.extra = ""
        ImportError.__init__(
            self,
            "the suffix_decoding policy needs the suffix tree of arctic-inference. In a checkout: "
            "python -m benchmarks.build_suffix_peer, then PYTHONPATH=.cache/suffix_peer",
        )
