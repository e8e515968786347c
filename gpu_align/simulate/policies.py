"""The policies the simulator can run, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpu_align.policies.base import Policy
from gpu_align.simulate.records import Record
from gpu_align.simulate.tokenizers import line_ending_ids, load_tokenizer

if TYPE_CHECKING:
    from gpu_align.config import DrafterConfig

#: This library's drafter.
OURS = "gpu_align"
#: Settings of a `DrafterConfig` along the trade-off, from few rejected drafts to few steps.
SWEEP: tuple[dict[str, Any], ...] = (
    {"length_factor": 0.5, "min_survival": 0.97},
    {"length_factor": 0.5, "min_survival": 0.95},
    {"length_factor": 1, "min_survival": 0.8},
    {"length_factor": 1, "min_survival": 0.5},
    {"length_factor": 1, "min_survival": 0.3},
    {"length_factor": 1.5, "min_survival": 0.3},
    {"length_factor": 2, "min_survival": 0.2},
    {"length_factor": 3, "min_survival": 0.1},
    {"length_factor": 6, "min_survival": 0.08},
    {"length_factor": 8, "min_survival": 0.05},
    {"length_factor": 12, "min_survival": 0.05},
    {"length_factor": 12, "min_survival": 0.02},
    {"length_factor": 64, "min_survival": 0.02},
    {"length_factor": 64, "min_survival": 0.005},
)


def setting_name(setting: Mapping[str, Any]) -> str:
    """What our drafter is called in reports: ``gpu_align`` by default, else with its settings."""
    return " ".join([OURS, *(f"{name}={value}" for name, value in setting.items())])


def policy_names() -> list[str]:
    """Every policy: ours, then those of `gpu_align.policies` in their order."""
    from gpu_align.policies import OPTIONAL_POLICIES, POLICIES

    return [OURS, *POLICIES, *OPTIONAL_POLICIES]


def runnable_policy_names() -> list[str]:
    """Those of `policy_names` that need nothing which is not installed."""
    from gpu_align.policies import available_policies

    return [OURS, *available_policies()]


def make_policies(
    names: Sequence[str],
    records: Sequence[Record],
    num_draft_tokens: int,
    settings: Sequence[Mapping[str, Any]] = ({},),
) -> list[Policy]:
    """One policy for each of `names`, large enough for `records`; ours once for each of `settings`.

    Each setting holds fields of `DrafterConfig`, like those of `SWEEP`; an empty one is the default.

    ``static_text`` works on lines. Where all records name the same tokenizer, it is told which tokens end
    one; otherwise it guesses.

    Raises:
        ValueError: a name is not one of `policy_names`.
        MissingExtraError: a policy's package is not installed.
    """
    from gpu_align.policies import OPTIONAL_POLICIES, POLICIES, StaticText

    factories = {**POLICIES, **OPTIONAL_POLICIES}

    policies: list[Policy] = []
    for name in names:
        if name == OURS:
            # Imported here: the other policies run without torch.
            from gpu_align.simulate.drafter_policy import DrafterPolicy

            configs = [(config_of(setting), setting_name(setting)) for setting in settings]
            policies += [DrafterPolicy.for_records(records, num_draft_tokens, *config) for config in configs]
        elif name == "static_text":
            policies.append(StaticText(ends_line=_ends_line(records)))
        elif name in factories:
            policies.append(factories[name]())
        else:
            raise ValueError(f"policy: expected one of {', '.join(policy_names())}, found {name!r}")
    return policies


def config_of(setting: Mapping[str, Any]) -> DrafterConfig:
    """The `DrafterConfig` with these fields and the defaults of the others.

    Raises:
        ValueError: a value outside its domain.
    """
    from gpu_align.config import DrafterConfig

    return DrafterConfig(**setting)


def _ends_line(records: Sequence[Record]) -> Callable[[int], bool] | None:
    """Whether a token ends a line, if one tokenizer holds for all `records`, else None."""
    names = {record.tokenizer for record in records}
    name = names.pop() if len(names) == 1 else None
    if name is None:
        return None
    ids = {token for record in records for text in (record.prediction, record.output) for token in text}
    return line_ending_ids(load_tokenizer(name), ids).__contains__
