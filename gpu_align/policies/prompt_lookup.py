"""Prompt lookup: draft what followed an earlier occurrence of the last few tokens."""

from __future__ import annotations

from typing import Literal

from gpu_align.policies._sequence import SequencePolicy, check_count

Tie = Literal["latest", "earliest"]


class PromptLookup(SequencePolicy):
    """N-gram lookup over prompt, prediction and output as one text.

    ::

        text = prompt + prediction + output
        for n in pattern_max, …, pattern_min:
            ends = [e for e in range(n, len(text) - prediction_min + 1) if text[e - n : e] == text[-n:]]
            if ends:
                e = max(ends) if tie == "latest" else min(ends)
                return text[e : e + min(prediction_max, K)]
        return []

    An occurrence may overlap the pattern, and a draft may run from the prediction on into the output, as
    in any text. The policy has no notion of a cursor: order counts only through the tie rule.

    Args:
        pattern_min: shortest pattern that is looked up; ``>= 1``.
        pattern_max: longest pattern; ``>= pattern_min``. The longest one with an occurrence decides.
        prediction_min: occurrences followed by fewer tokens are passed over; ``>= 1``.
        prediction_max: most tokens drafted a step; ``None`` leaves the limit to K.
        tie: which of several occurrences of that pattern is taken.
        name: the name in reports.

    Cost: ``pattern_max - pattern_min + 1`` dictionary entries a token, whatever the length of the text;
    the result is that of the scan above.

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
        self._pattern_max = check_count("pattern_max", pattern_max, minimum=self._pattern_min)
        self._prediction_min = check_count("prediction_min", prediction_min)
        self._prediction_max: int | None = None
        if prediction_max is not None:
            self._prediction_max = check_count("prediction_max", prediction_max, minimum=self._prediction_min)
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
        length = self._num_draft_tokens
        if self._prediction_max is not None:
            length = min(length, self._prediction_max)
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
