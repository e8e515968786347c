"""Settings of a `Drafter`."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from pathlib import Path

import torch

from ..ops.choose import SurvivalTables
from ..ops.errors import check_int, check_probability, check_type
from ..ops.layout import StepSettings, context_index_bits
from ..ops.match import MAX_MATCH
from .survival import SHIPPED, fit_curves, make_tables, read_survival, read_table


@dataclass(frozen=True)
class DrafterConfig:
    """How eagerly to draft. The defaults suit edits of code.

    `length_factor` and `min_survival` move along the same trade-off, more tokens a verification step against
    more rejected drafts, and work best together.

    TypeError, ValueError: a setting of another type, or outside its domain.
    """

    #: Most drafts for each token of matched suffix, and as many before any; ``>= 0``, a multiple of 0.25.
    length_factor: float = 8.0
    #: Drafting stops where the probability that all drafts up to here are accepted falls below this; 0 to 1.
    min_survival: float = 0.0525
    #: The same for drafts from a prediction that the output does not follow, where it is larger; 0 to 1.
    min_survival_lost: float = 0.35
    #: The same for drafts from a recipe, whatever the other two are: such a draft is short, and where nothing else
    #: is likely each accepted token saves a step. 0 to 1.
    min_survival_recipe: float = 0.1
    #: Shortest suffix that counts as a match, tokens; ``1 <= min_match <= 64``.
    min_match: int = 1
    #: Whether to draft from the request's own prompt and output as well.
    use_context: bool = True
    #: A table written by ``gpu-align tune`` instead of the shipped one.
    survival_table: Path | str | None = None

    @classmethod
    def tuned(cls, path: Path | str) -> DrafterConfig:
        """The settings that ``gpu-align tune`` found best, with its table. ValueError: it is none."""
        settings = read_table(Path(path)).get("settings") or {}
        names = "length_factor", "min_survival", "min_survival_recipe"
        if unknown := [str(name) for name in settings if name not in names]:
            raise ValueError(f"{path}: settings: expected {', '.join(names)}, found {unknown[0][:40]!r}")
        try:
            return cls(**settings, survival_table=path)
        except TypeError as error:
            raise ValueError(f"{path}: {error}") from None

    def step_settings(self, vocab_size: int, max_context_len: int) -> StepSettings:
        """These settings as a step takes them."""
        quarters, shift = int(4 * self.length_factor), 32 - context_index_bits(max_context_len)
        return StepSettings(quarters, self.min_match, vocab_size, shift)

    def tables_for(self, num_draft_tokens: int, device: torch.device | str) -> SurvivalTables:
        """The survival tables of these settings for K, on a device. ValueError: the file is no table."""
        path = SHIPPED if self.survival_table is None else Path(self.survival_table)
        curves, calibration = read_survival(path)
        survival = fit_curves(curves, num_draft_tokens)
        return make_tables(survival, device, self.min_survival, self.min_survival_lost, calibration)

    def __post_init__(self) -> None:
        check_type("length_factor", self.length_factor, Real, "a number")
        quarters = 4 * self.length_factor
        # The upper end keeps its product with a matched length within the kernel's 32 bits.
        if not (0 <= quarters <= 1 << 22 and quarters == int(quarters)):
            expected = "a multiple of 0.25 from 0 to 2^20"
            raise ValueError(f"length_factor: expected {expected}, found {self.length_factor}")
        for name in ("min_survival", "min_survival_lost", "min_survival_recipe"):
            check_probability(name, getattr(self, name))
        check_int("min_match", self.min_match, 1, MAX_MATCH)
        check_type("use_context", self.use_context, bool, "a bool")
        check_type("survival_table", self.survival_table, str | Path | None, "a str or Path")
