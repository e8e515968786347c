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
from contextlib import contextmanager

logger = logging.getLogger("vllm.gpu_align")

#: Seconds after which it is said.
QUIET = 2.0


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
        self._thread = threading.Thread(target=self._run, name="gpu_align-warm-up", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until it is done."""
        self._thread.join()

    def _run(self) -> None:
        try:
            with compiling(self._what):
                self._function()
        except Exception as error:
            logger.warning("gpu_align could not compile %s: %s: %s", self._what, type(error).__name__, error)
