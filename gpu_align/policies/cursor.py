"""Follow the prediction until the first mismatch, then stop drafting."""

from __future__ import annotations

from gpu_align.policies._sequence import CursorPolicy, follow


class Cursor(CursorPolicy):
    """The simplest predicted output: one cursor, no realignment.

    ::

        cursor = 0
        each step:  draft = prediction[cursor : cursor + K]
                    cursor += 1 for each new token that equals prediction[cursor]
                    at the first that does not: stop drafting for the rest of the sequence

    The cursor starts at 0, so the policy can draft in the prefill step. A token beyond the end of the
    prediction counts as a mismatch. O(1) a token.

    Example: prediction ``[5, 6, 7, 8]``, output ``[5, 6, 9, 8]``, K = 2. Step 1 drafts ``5 6`` and gets
    ``5 6 9``; from then on every draft is empty, although ``8`` matches again.

    Source: this is the floor that every published scheme improves on; vLLM's pull request 23450 ("Add
    Predicted Outputs API", 2025) and a static draft without realignment behave like it.
    """

    def __init__(self, name: str = "cursor") -> None:
        super().__init__(name)

    def _advance(self, tokens: list[int]) -> None:
        self._cursor = follow(self._prediction, self._cursor, tokens)
