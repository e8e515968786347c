"""The policies the simulator can run, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpu_align.policies.base import Policy
from gpu_align.simulate.records import Record
from gpu_align.simulate.tokenizers import line_ending_ids, load_tokenizer

#: This library's drafter.
OURS = "gpu_align"


def policy_names() -> list[str]:
    """Every policy: ours, then those of `gpu_align.policies` in their order."""
    from gpu_align.policies import OPTIONAL_POLICIES, POLICIES

    return [OURS, *POLICIES, *OPTIONAL_POLICIES]


def runnable_policy_names() -> list[str]:
    """Those of `policy_names` that need nothing which is not installed."""
    from gpu_align.policies import available_policies

    return [OURS, *available_policies()]


def make_policies(names: Sequence[str], records: Sequence[Record], num_draft_tokens: int) -> list[Policy]:
    """One policy for each of `names`, large enough for `records`.

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

            policies.append(DrafterPolicy.for_records(records, num_draft_tokens))
        elif name == "static_text":
            policies.append(StaticText(ends_line=_ends_line(records)))
        elif name in factories:
            policies.append(factories[name]())
        else:
            raise ValueError(f"policy: expected one of {', '.join(policy_names())}, found {name!r}")
    return policies


def _ends_line(records: Sequence[Record]) -> Callable[[int], bool] | None:
    """Whether a token ends a line, if one tokenizer holds for all `records`, else None."""
    names = {record.tokenizer for record in records}
    name = names.pop() if len(names) == 1 else None
    if name is None:
        return None
    ids = {token for record in records for text in (record.prediction, record.output) for token in text}
    return line_ending_ids(load_tokenizer(name), ids).__contains__
