"""A server as a process: a group of its own, one log, waited for until it is healthy, and always stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from gpu_align.bench.errors import BenchError

#: Seconds between two looks at a server that is starting.
POLL_S = 0.25
#: Seconds to end in order: of a server that was healthy, and of one that was starting. While its engine starts,
#: vLLM acts on no SIGTERM, and has nothing to lose.
STOP_GRACE_S, START_GRACE_S = 20.0, 2.0
_TAIL_LINES = 25


class ServerProcess:
    """Leaving the `with` block stops the whole group; if this process itself is killed, a guard does.

    Args:
        command: what to run.
        url: where it answers; ``url + "/health"`` gives 200 when it is ready.
        log: the file its output goes to; overwritten.
        env: its environment.
    """

    def __init__(self, command: Sequence[str], url: str, log: Path, env: Mapping[str, str]) -> None:
        self.url = url
        self.log = log
        self._command = list(command)
        self._env = dict(env)
        self._ready = self._stopped = False

    def __enter__(self) -> ServerProcess:
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        self._guard: subprocess.Popen[bytes] | None = None
        try:
            self._guard = _start_guard(self.pid)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process id of the group's leader."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def check_alive(self, when: str = "") -> None:
        """Raise BenchError with the end of the log when the process has ended; `when` completes the sentence."""
        if self.exit_code is not None:
            self._fail(f"the server ended with exit code {self.exit_code}{when}")

    def waiting(self, timeout_s: float) -> Iterator[float]:
        """Give the seconds waited so far until the server is healthy; whoever asks pauses between two of them.

        Raises:
            BenchError: it ended, or is not healthy after `timeout_s`; with the end of its log.
        """
        started = time.monotonic()
        while True:
            waited = time.monotonic() - started
            self.check_alive(" before it was ready")
            if self._healthy():
                self._ready = True
                return
            if waited > timeout_s:
                self._fail(f"the server is not ready after {waited:.0f} s")
            yield waited

    def wait_ready(self, timeout_s: float, tick: Callable[[float], None]) -> float:
        """Wait until the server is healthy and return the seconds it took. Raises as `waiting` does."""
        started = time.monotonic()
        for waited in self.waiting(timeout_s):
            tick(waited)
            time.sleep(POLL_S)
        return time.monotonic() - started

    def stop(self, grace_s: float | None = None) -> None:
        """End the whole group: asked first, forced after `grace_s` (None: as it needs). Again is harmless."""
        if self._stopped:
            return
        self._stopped = True
        try:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s if grace_s is not None else self._grace_s())
        finally:  # a second Ctrl-C ends the waiting, not the stopping
            self._signal(signal.SIGKILL)  # workers that the leader left behind are still in its group
            self._process.wait()
            if self._guard is not None:
                self._guard.communicate(b".")

    def _grace_s(self) -> float:
        return STOP_GRACE_S if self._ready else START_GRACE_S

    def last_line(self) -> str:
        """The last line of the log that is not empty."""
        return next(reversed(self._lines()), "").strip()

    def tail(self) -> str:
        """The last lines of the log that are not empty."""
        return "\n".join(self._lines()[-_TAIL_LINES:])

    def _lines(self) -> list[str]:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return [line for line in text.splitlines() if line.strip()]

    def _fail(self, message: str) -> None:
        raise BenchError(f"{message}; the end of {self.log}:", log=self.tail())

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def _start_guard(group: int) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("guard.py")
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(script), str(group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C of the terminal is not for it
    )
