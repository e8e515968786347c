"""What a seam is: a private name of vLLM, the group it is installed in, and what a probe finds of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

TESTED = ("0.32.0",)

Kind = Literal["wrap", "call", "implement", "field", "global"]


@dataclass(frozen=True)
class Seam:
    """A name that vLLM does not promise to keep.

    group: what is installed together with it, a key of `table.GROUPS`.
    kind: "wrap" (replaced by a wrapper that calls the original), "call" (called as it is), "implement"
        (vLLM calls ours in its place), "field" (an instance attribute or dataclass field that is read),
        "global" (a name in a module that is read or, for a moment, replaced).
    module, attribute: where it is; `attribute` is dotted below the module.
    purpose: what this package needs it for.
    parameters: for "wrap", "call" and "implement": the leading parameters, in order, that must be there.
        Further parameters of a called function must have defaults.
    """

    group: str
    kind: Kind
    module: str
    attribute: str
    purpose: str
    parameters: tuple[str, ...] = ()
    tested: tuple[str, ...] = TESTED

    @property
    def name(self) -> str:
        """What `@seam` and reports call it: the group and the last part of the attribute."""
        return f"{self.group}.{self.attribute.rpartition('.')[2]}"


@dataclass(frozen=True)
class SeamStatus:
    """What a probe found: "found", "missing", or "changed" with the difference in `detail`."""

    seam: Seam
    state: Literal["found", "missing", "changed"]
    detail: str = ""


@dataclass(frozen=True)
class Group:
    """Seams that are installed together: all of them or none.

    turns_off: what a seam that is missing costs. "plugin": vLLM serves as without this package. "usage": no usage
        and no metrics. "dump": vLLM's dump of a failed step shows draft tokens. "parameters": vLLM refuses `min_p`
        and `logit_bias`. "caller": whoever installs the group does without it, and says so.
    after: the vLLM module after whose import the group is installed; empty where the drafter installs it, so that
        an engine that does not draft from predictions never sees it.
    rooms: our modules that define the wrappers, imported when the group is installed.
    """

    turns_off: Literal["plugin", "usage", "dump", "parameters", "caller"]
    after: str = ""
    rooms: tuple[str, ...] = ()


def signature_difference(seam: Seam, names: Sequence[str], needed: Collection[str]) -> str:
    """What keeps a seam's signature from being the expected one; empty when nothing does.

    names: all parameters, in order. needed: those that need an argument.
    """
    if tuple(names[: len(seam.parameters)]) != seam.parameters:
        return f"expected parameters {', '.join(seam.parameters)}, got {', '.join(names)}"
    more = [name for name in names[len(seam.parameters) :] if name in needed]
    if seam.kind == "call" and more:
        return f"needs further parameters {', '.join(more)}"
    return ""
