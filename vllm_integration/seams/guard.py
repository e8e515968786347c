"""Guards: a fault switches off the part of the plugin that it is in and logs one line; requests go on."""

from __future__ import annotations

import functools
import logging
import math
import os
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

logger = logging.getLogger("vllm.gpu_align")

Function = TypeVar("Function", bound=Callable[..., Any])

#: Characters that are shown of an id, and of an error message.
_LONGEST_ID, _LONGEST_MESSAGE = 100, 400
#: Frames of a traceback that are shown, the innermost first.
_MOST_FRAMES = 8
#: What holds our packages, and vLLM as a rule.
_ROOT = Path(__file__).parents[2]
#: Of a part of the core: faults in a row that turn it off, and seconds after which it is tried again.
IN_A_ROW, PAUSE = 3, 60.0
#: Names the lines that a process of this server has already logged; its children inherit it.
_TOLD = "_GPU_ALIGN_TOLD"


def shown_id(req_id: object) -> str:
    """A request id for a log line, which a client may have chosen: up to 100 characters, backslashes doubled."""
    return shown_reason(str(req_id).replace("\\", "\\\\"), _LONGEST_ID)


def shown_error(error: BaseException) -> str:
    """`Type: message` of an exception in one line, up to 400 characters of the message."""
    try:
        message = str(error)
    except Exception:  # a __str__ of another library
        message = ""
    return f"{type(error).__name__}: {shown_reason(message)}"


def shown_reason(reason: object, longest: int = _LONGEST_MESSAGE) -> str:
    """A reason in one line, cut after `longest` characters; what does not print becomes escapes."""
    text = str(reason)
    head = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii")
        for c in text[:longest]
    )
    return head if len(text) <= longest else f"{head}… of {len(text)} characters"


def shown_fault(error: BaseException) -> str:
    """`Type at file:line function, …` of an exception, the innermost frame first. Never its message, which may
    repeat a value; an `OSError` adds the system's words for its number."""
    shown = type(error).__name__
    if isinstance(error, OSError) and error.errno is not None:
        shown += f" ({os.strerror(error.errno)})"
    frames = [*traceback.walk_tb(error.__traceback__)][::-1][:_MOST_FRAMES]
    for place, (frame, line) in enumerate(frames):
        path = Path(frame.f_code.co_filename)
        short = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else "/".join(path.parts[-3:])
        shown += f"{', ' if place else ' at '}{short}:{line} {frame.f_code.co_name}"
    return shown


def strict() -> bool:
    """Whether a missing name and a fault shall raise. This must not fail while vLLM starts."""
    return os.environ.get("GPU_ALIGN_STRICT", "").strip().lower() in ("1", "true", "yes", "on")


@functools.cache
def warn_once(line: str) -> None:
    """A WARNING, once a process."""
    logger.warning("%s", line)


def first_to_tell(line: str) -> bool:
    """Whether no process of this server before this one, parents included, has logged this line."""
    told = os.environ.get(_TOLD, "").split()
    mark = format(zlib.crc32(line.encode()), "x")
    if mark in told:
        return False
    os.environ[_TOLD] = " ".join([*told, mark])
    return True


#: Engine or None, part → why it is off in this process.
_faults: dict[tuple[object, str], str] = {}


def faults(engine: object = None) -> dict[str, str]:
    """The parts of the plugin that are off in this process, and why. engine: without those of other engines."""
    return {part: why for (of, part), why in _faults.items() if engine is None or of in (None, engine)}


class Guard:
    """Runs the steps of one part of the plugin.

        guard = Guard("step log", "writes no step logs")
        guard.run(step, *args)         # what the step returns; None where it fails, or while the part is off

    A fault is one ERROR line, once, and the part is off in this process; with `GPU_ALIGN_STRICT=1` it is raised.

    part: its name in `faults()`. costs: the line's words. spared: types of errors that are never raised. then:
    called after each fault. engine: what stands for its engine in `faults`, if it is one's.

    core: a fault costs its step alone; `IN_A_ROW` without a success between them turn the part off for `PAUSE`
    seconds of `clock`. Then the next step tries again, and one more fault ends that.

    num_ranks: tensor-parallel ranks that verify the drafts which each made itself. A rank without drafts beside
    others with them would compute another sequence. A `TypeError` or `ValueError` comes from arguments, which are
    the same on all ranks; others may come from the machine, and are raised. `clock` has to count steps there.
    """

    def __init__(
        self,
        part: str,
        costs: str,
        *,
        core: bool = False,
        clock: Callable[[], float] | None = None,
        spared: tuple[type[Exception], ...] = (),
        num_ranks: int = 1,
        then: Callable[[], object] = lambda: None,
        engine: object = None,
    ) -> None:
        self.part, self._costs, self._key = part, costs, (engine, part)
        self._in_a_row, self._pause = (IN_A_ROW, PAUSE) if core else (1, math.inf)
        self._clock, self._then = clock or time.monotonic, then
        self._spared, self.num_ranks = spared, num_ranks
        self._count, self._until = 0, -math.inf
        self._told: set[tuple[str, bool]] = set()

    @property
    def is_off(self) -> bool:
        return self._until != -math.inf and self._clock() < self._until

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """`step(*args)`; None where that fails, or while the part is off."""
        if self.is_off:
            return None
        count = self._count  # a step may run others of this part
        try:
            result = step(*args)
        except Exception as error:
            self.fail(error)
            return None
        if count and self._count == count:
            self.succeeded()
        return result

    def fail(self, error: Exception) -> None:
        """A step has failed."""
        self.raise_if_wrong(error)
        self._count += 1
        if self._count >= self._in_a_row:
            self.end(error, self._pause)
        else:
            self.tell("in this step", error)
        self._then()

    def end(self, error: Exception | str, pause: float = math.inf) -> None:
        """Turn the part off, for good or for so many seconds. A reason in words was told before."""
        self._count, self._until = self._in_a_row, self._clock() + pause
        if isinstance(error, str):
            _faults[self._key] = error
            return
        self.raise_if_wrong(error)
        self.tell("any more" if pause == math.inf else f"for {pause:.0f} s", error)
        _faults[self._key] = shown_fault(error)

    def tell(self, how_long: str, error: Exception) -> None:
        """The ERROR line, once for each fault."""
        fault = shown_fault(error)
        if (mark := (fault, self._count >= self._in_a_row)) not in self._told:
            self._told.add(mark)
            logger.error("gpu_align %s %s: %s", self._costs, how_long, fault)

    def raise_if_wrong(self, error: Exception) -> None:
        """Raise the error where going on would be wrong, or shall not be tried."""
        if isinstance(error, self._spared):
            return
        if strict() or (self.num_ranks > 1 and not isinstance(error, (TypeError, ValueError))):
            raise error

    def succeeded(self) -> None:
        """A step has not failed; `run` says so itself."""
        if not self._count:
            return
        self._count, self._until = 0, -math.inf
        if _faults.pop(self._key, None) is not None:
            logger.warning("gpu_align: %s works again", self.part)


def guarded(method: Function) -> Function:
    """A method of an object with a `guard`: what it returns, None where it fails or the part is off."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.guard.run(functools.partial(method, self, *args, **kwargs))

    return run  # type: ignore[return-value]
