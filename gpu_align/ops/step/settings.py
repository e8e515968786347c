"""What a step does not read from tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..draft import length_quarters

if TYPE_CHECKING:
    from ...config import DrafterConfig


class StepSettings(NamedTuple):
    """What a step does not read from tensors."""

    #: Drafts for each four tokens of matched suffix.
    length_quarters: int
    #: Shortest match in the prediction and in the context, 1 to 64.
    min_match: int
    min_context_match: int
    #: A draft ends before the first token that is not below it.
    vocab_size: int

    @classmethod
    def of(cls, config: DrafterConfig, vocab_size: int) -> StepSettings:
        """The settings that a drafter's configuration says."""
        quarters = length_quarters(config.length_factor)
        return cls(quarters, config.min_match, config.min_context_match, vocab_size)
