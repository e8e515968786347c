"""What is compiled is compiled while the server starts, and said where it takes long.

with compiling("the drafter's step"):
    drafter = Drafter(...)

log = WarmUp("the step log", function)      # in the background, from now on
log.finish()                                # before the server is ready
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from vllm_integration.seams.log_text import shown_error

logger = logging.getLogger("vllm.gpu_align")

#: Seconds after which it is said.
QUIET = 2.0
#: Seconds that a start waits for what is compiled in the background.
PATIENCE = 300.0


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Two INFO lines, where this takes more than `QUIET` seconds: that it goes on, and how long it took."""
    said = threading.Event()

    def say() -> None:
        said.set()
        logger.info("gpu_align compiles %s; what is compiled is cached for the next start", what)

    timer = threading.Timer(QUIET, say)
    timer.daemon = True
    started = time.perf_counter()
    with suppress(RuntimeError):  # no more threads: what is compiled matters more than that it is said
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if said.is_set():
            logger.info("gpu_align compiled %s in %.1f s", what, time.perf_counter() - started)


class WarmUp:
    """Runs `function` in a thread, while the engine does other things.

    A failure is a WARNING: who needs what was to be compiled meets it again, and handles it there.
    """

    def __init__(self, what: str, function: Callable[[], None]) -> None:
        self._what, self._function = what, function
        self._thread: threading.Thread | None = None
        thread = threading.Thread(target=self._run, name="gpu_align-warm-up", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            self._failed(error)
        else:
            self._thread = thread

    def finish(self) -> None:
        """Wait until it is done. Raises `TimeoutError` if it is not after `PATIENCE` seconds: who needs what is
        being compiled would wait for it too."""
        if self._thread is not None:
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                raise TimeoutError(f"{self._what} is not compiled after {PATIENCE:.0f} s")

    def _run(self) -> None:
        try:
            with compiling(self._what):
                self._function()
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        logger.warning("gpu_align could not compile %s: %s", self._what, shown_error(error))
