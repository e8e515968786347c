"""Calls into somebody's predictor that may never return."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from .base import TokenPredictor

Result = TypeVar("Result")


def is_ours(predictor: TokenPredictor) -> bool:
    """Whether it, and every predictor in it, is a class of this package: these return in bounded time."""
    inner = getattr(predictor, "predictors", ())
    return type(predictor).__module__.startswith(__package__ + ".") and all(map(is_ours, inner))


class Guard:
    """Runs calls one by one on a thread of its own, and gives up on one that takes longer than `timeout`.

    Python cannot end a thread: one that hangs stays behind, as a daemon, and the guard takes no more calls.

    Args:
        timeout: seconds a call may take; None runs calls on the caller's thread, for as long as they take.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], Result]) -> Result:
        """What ``function()`` returns or raises.

        Raises:
            TimeoutError: it did not return in time.
        """
        if self._timeout is None:
            return function()
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._calls,), daemon=True)
            self._thread.start()
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.put((function, answer))
        try:
            succeeded, result = answer.get(timeout=self._timeout)
        except queue.Empty:
            raise TimeoutError(f"no answer in {self._timeout:g} s") from None
        if not succeeded:
            raise result
        value: Result = result
        return value

    def close(self) -> None:
        """End the thread, once it is idle."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread = None


def _serve(calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None]) -> None:
    while (call := calls.get()) is not None:
        function, answer = call
        try:
            answer.put((True, function()))
        except BaseException as error:  # the caller raises it
            answer.put((False, error))
