"""Suffix decoding that knows earlier responses, as Arctic's cache keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpu_align.tools.policies import REQUEST, SuffixDecoding, suffix_tree


class EarlierResponses:
    """Arctic's tree of earlier responses, filled once; any number of policies may share it."""

    def __init__(self, responses: Iterable[Sequence[int]], max_tree_depth: int) -> None:
        self.max_tree_depth = max_tree_depth
        self.cache = suffix_tree(max_tree_depth, max_cached_requests=-1)
        for number, tokens in enumerate(responses, start=REQUEST + 1):
            self.cache.start_request(number, [])
            self.cache.add_active_response(number, list(tokens))
            self.cache.stop_request(number)
        # Whoever asks does so in the name of a request; this one has neither a prompt nor a response.
        self.cache.start_request(REQUEST, [])


class CachedSuffixDecoding(SuffixDecoding):
    """The draft of higher score, of the request's own tree or that of earlier responses; if equal its own."""

    def __init__(self, max_spec_factor: float, earlier: EarlierResponses) -> None:
        super().__init__(max_spec_factor, earlier.max_tree_depth)
        self._trees.append(earlier.cache)
