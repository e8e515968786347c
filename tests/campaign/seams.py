"""Every private name of vLLM that the plugin uses, renamed or changed, one at a time.

In the vLLM that this process has imported, where its group is then installed. Exactly this name has to be
reported, and a group that misses one wraps nothing, costs what the table says, and leaves the others whole.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.campaign.campaign import Campaign, Row, Tally, main
from vllm_integration.seams import install as installer
from vllm_integration.seams import source_probe
from vllm_integration.seams.table import GROUPS, SEAMS, Seam

#: What the table of docs/developer/faults.md says a missing name costs, by `turns_off`: the one ERROR line.
LINES = {
    "plugin": "gpu_align is off, vLLM serves without predicted outputs: ",
    "usage": "gpu_align reports no usage: ",
    "dump": "gpu_align does not keep draft tokens out of vLLM's crash dump: ",
    "parameters": "gpu_align leaves min_p and logit_bias to vLLM, which refuses them: ",
    "caller": "",
}
OTHER = "spelt_differently"
#: What has an attribute, and its name.
Place = tuple[Any, str]
#: A short run takes every n-th.
EVERY = 8


def run(c: Campaign) -> Iterator[Row]:
    changes = [
        (seam, how) for seam in SEAMS for how in ("renamed", "changed") if how == "renamed" or seam.parameters
    ]
    chosen = changes[:: c.size(1, EVERY)]
    what = "every seam renamed or changed, in process"
    if source_probe.installed_root() is None:
        yield c.not_run(what, len(changes), "vLLM is not installed")
        return
    tally = c.tally(what, len(changes), len(chosen))
    _in_process(tally, chosen)
    yield tally.row(
        f"{len(SEAMS)} names, {len(changes) - len(SEAMS)} of them with a signature, {len(GROUPS)} groups"
    )


def _in_process(tally: Tally, changes: list[tuple[Seam, str]]) -> None:
    for group in GROUPS.values():
        for room in group.rooms:
            importlib.import_module(room)
    places = {seam: _owner(seam) for seam in SEAMS}
    originals = {seam: inspect.getattr_static(*places[seam]) for seam in SEAMS if seam.kind == "wrap"}

    def is_wrapped(seam: Seam) -> bool:
        owner, leaf = places[seam]
        return hasattr(inspect.getattr_static(owner, leaf, None), installer.MARK)

    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    installer.logger.addHandler(handler)
    installer.logger.propagate = False
    for seam, how in changes:
        wrong = []
        with _as_it_was(originals, places), _edited(seam, how, places) as touched:
            lines.clear()
            reason = installer.install(seam.group)
            state = "missing" if how == "renamed" else "changed"
            same_place = [s for s in SEAMS if s.group == seam.group and touched(s)]
            reported = re.findall(r"(vllm[\w.]*) is (missing|changed): ", reason)
            expected = [(f"{s.module}.{s.attribute}", state) for s in same_place]
            if (
                not reported
                or reported != expected[: len(reported) if reason.endswith(" characters") else None]
            ):
                wrong.append(f"reported {reported}")
            if any(is_wrapped(s) for s in originals if s.group == seam.group):
                wrong.append("something of the group is wrapped")
            turns_off = GROUPS[seam.group].turns_off
            if [line.startswith(LINES[turns_off]) for line in lines] != [True] * bool(LINES[turns_off]):
                wrong.append(f"lines {lines}")
            if (installer.off_reason() is not None) != (turns_off == "plugin"):
                wrong.append(f"off: {installer.off_reason()}")
            for name in GROUPS:
                if any(touched(s) for s in SEAMS if s.group == name):
                    continue
                wrapped = [s for s in originals if s.group == name]
                if installer.install(name) or not all(map(is_wrapped, wrapped)):
                    wrong.append(f"{name} is not whole")
        tally.check(not wrong, case={"seam": seam.name, "how": how, "wrong": wrong, "reason": reason})
    installer.logger.removeHandler(handler)


@contextmanager
def _as_it_was(originals: dict[Seam, Any], places: dict[Seam, Place]) -> Iterator[None]:
    """The plugin on and nothing wrapped, before and after."""
    installer._off_reason = None
    try:
        yield
    finally:
        installer._off_reason = None
        for seam, original in originals.items():
            if inspect.getattr_static(*places[seam]) is not original:
                setattr(*places[seam], original)


def _owner(seam: Seam) -> Place:
    owner: Any = importlib.import_module(seam.module)
    *path, leaf = seam.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, leaf


@contextmanager
def _edited(seam: Seam, how: str, places: dict[Seam, Place]) -> Iterator[Callable[[Seam], bool]]:
    """vLLM with this name spelt differently, or with another signature; which seams this touches."""
    owner, leaf = places[seam]
    homes = _homes(owner)
    if how == "renamed" and leaf == "__init__":  # every class has one: the class is renamed
        leaf, homes = owner.__name__, [importlib.import_module(seam.module)]
    with ExitStack() as undo:
        for home in homes:
            if seam.kind == "field":
                _rename_field(home, leaf, undo)
            elif leaf in vars(home):
                original = vars(home)[leaf]
                undo.callback(setattr, home, leaf, original)
                if how == "changed":
                    setattr(home, leaf, _with_another_signature(original, seam))
                else:
                    delattr(home, leaf)

        def touched(other: Seam) -> bool:
            if isinstance(homes[0], types.ModuleType):
                first, _, rest = other.attribute.partition(".")
                return other.module == seam.module and first == leaf and (how == "renamed" or not rest)
            same = places[other][1] == leaf and bool({*_homes(places[other][0])} & {*homes})
            return same and (how == "renamed" or bool(other.parameters))

        yield touched


def _homes(owner: Any) -> list[Any]:
    """Where an attribute of `owner` may be defined."""
    return [base for base in getattr(owner, "__mro__", (owner,)) if base is not object]


def _rename_field(home: type, name: str, undo: ExitStack) -> None:
    """In what a class declares, and in the code of its methods."""
    annotations = vars(home).get("__annotations__", {})
    if name in annotations:
        undo.callback(annotations.__setitem__, name, annotations.pop(name))
    for key, member in list(vars(home).items()):
        if key == name:
            undo.callback(setattr, home, name, member)
            delattr(home, name)
            continue
        function = inspect.unwrap(member) if callable(member) else None
        code = getattr(function, "__code__", None)
        if isinstance(code, types.CodeType) and name in code.co_names:
            undo.callback(setattr, function, "__code__", code)
            names = tuple(OTHER if each == name else each for each in code.co_names)
            function.__code__ = code.replace(co_names=names)  # type: ignore[union-attr]


def _with_another_signature(original: Any, seam: Seam) -> Any:
    """Its last parameter that we know is called differently."""
    signature = inspect.signature(original)
    last = seam.parameters[-1]
    parameters = [p.replace(name=OTHER) if p.name == last else p for p in signature.parameters.values()]

    def changed(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    # A class stays one, with what else it has.
    other: Any = type(original.__name__, (original,), {}) if isinstance(original, type) else changed
    other.__signature__ = signature.replace(parameters=parameters)
    return other


if __name__ == "__main__":
    main(run)
