"""Ends a process group when the process that started it is gone, however it went: ``python guard.py GROUP``.

That process holds the other end of the standard input. A byte means that the group has been stopped in order, the
end without one that nobody is left to stop it. Run as a file, so that it loads nothing but this.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

GRACE_S = 5.0


def _main(group: int) -> None:
    if sys.stdin.buffer.read(1):
        return
    for number, pause in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 0.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
            time.sleep(pause)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
