"""OpenAI's Predicted Outputs as reverse-engineered from its token counts."""

from __future__ import annotations

from gpu_align.policies._sequence import SequencePolicy, check_count


class OpenAI(SequencePolicy):
    """Short lookahead, and a long wait after each divergence.

    ::

        aligned:   draft = prediction[cursor : cursor + min(lookahead, K)]
        diverged:  draft nothing until the last `resume_after` output tokens, all of them generated after
                   the token that diverged, occur in the prediction; cursor = where that occurrence ends,
                   and drafts begin `resume_delay` tokens later

    Several occurrences: the first one that ends after the cursor's position at the divergence, else the
    last one before it. The policy is aligned at position 0 from the start, so it can draft in the prefill
    step, which is what the hosted service does.

    Args:
        lookahead: most tokens drafted a step (16 in the service); one divergence rejects at most so many.
        resume_after: matching tokens needed to draft again (32 in the service).
        resume_delay: tokens that then still pass without a draft, each of which must continue the match. The
            published rule has none. The published counts of drafts with one token added, missing or replaced
            (accepted 21, 22 and 21, rejected 11) are those of a delay of 3, see docs/published.md.

    Attributes:
        accepted: drafted tokens that the model confirmed, since `start`.
        rejected: drafted tokens that it did not, since `start`.

    Both counters look at the last draft that `propose` returned; a step that was not preceded by `propose`
    counts nothing. Tokens that the model adds after a fully accepted draft are in neither: a correct draft
    of 58 tokens verified from the first one is 16 + 1 + 16 + 1 + 16 + 1 + 7, accepted 55 and 3 "extra".

    Cost: O(1) a token while aligned; O(resume_after) while diverged, after indexing the prediction once.

    Source: https://vamvas.ch/openai-predicted-outputs (lookahead, resumption and the 58-token example).
    """

    def __init__(
        self, lookahead: int = 16, resume_after: int = 32, resume_delay: int = 0, name: str = "openai"
    ) -> None:
        super().__init__(name)
        self._lookahead = check_count("lookahead", lookahead)
        self._resume_after = check_count("resume_after", resume_after)
        self._resume_delay = check_count("resume_delay", resume_delay, minimum=0)
        self._begin()

    def _begin(self) -> None:
        self.accepted = 0
        self.rejected = 0
        self._cursor = 0
        self._aligned = True
        self._delay = 0  # tokens that have to pass before the next draft
        self._since_divergence = 0
        self._window_ends: dict[tuple[int, ...], list[int]] | None = None
        self._offered: list[int] = []

    def _draft(self) -> list[int]:
        draft: list[int] = []
        if self._aligned and not self._delay:
            length = min(self._lookahead, self._num_draft_tokens)
            draft = self._prediction[self._cursor : self._cursor + length]
        self._offered = draft  # for the counters only; no draft depends on it
        return list(draft)

    def _advance(self, tokens: list[int]) -> None:
        matched = 0
        while matched < min(len(tokens), len(self._offered)) and tokens[matched] == self._offered[matched]:
            matched += 1
        self.accepted += matched
        self.rejected += len(self._offered) - matched
        self._offered = []
        first = len(self._output) - len(tokens)
        for position in range(first, len(self._output)):
            self._pass(position)

    def _pass(self, position: int) -> None:
        """Move past the output token at `position`."""
        if self._aligned:
            if self._prediction[self._cursor : self._cursor + 1] == [self._output[position]]:
                self._cursor += 1
                self._delay = max(0, self._delay - 1)
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
            self._delay = self._resume_delay

    def _ends_of(self, window: list[int]) -> list[int]:
        """Ascending positions of the prediction right after each occurrence of ``window``."""
        if self._window_ends is None:
            self._window_ends = {}
            for end in range(self._resume_after, len(self._prediction) + 1):
                key = tuple(self._prediction[end - self._resume_after : end])
                self._window_ends.setdefault(key, []).append(end)
        return self._window_ends.get(tuple(window), [])
