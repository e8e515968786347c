"""What tests need of a running server, independent of the model runner behind it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import psutil

K = 16  # draft tokens a step
MAX_MODEL_LEN = 512
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCH_COMPILE_DISABLE": "1",  # vLLM compiles a few functions for requests with log probabilities or penalties
    "OMP_NUM_THREADS": "1",
    "GPU_ALIGN_STRICT": "1",
}


def is_live(path: Path) -> bool:
    """Whether the request of a step log has not ended."""
    return "\nlive: true\n" in path.read_text()[:60]


@dataclass
class Server:
    """A running server: where it listens, where it writes step logs and its output, its process."""

    url: str
    logs: Path
    output: Path
    pid: int

    def has_ended(self, seconds: float = 0) -> bool:
        """Within so many."""
        deadline = time.monotonic() + seconds
        while psutil.pid_exists(self.pid) and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def engine_processes(self) -> list[psutil.Process]:
        """Its engine cores and their workers."""
        children = psutil.Process(self.pid).children(recursive=True)
        return [child for child in children if "resource_tracker" not in "".join(child.cmdline())]

    def forks(self) -> bool:
        """Whether its engine cores are forked, not spawned: a spawned one is a program with new variables."""
        variables = [Path(f"/proc/{child.pid}/environ").read_bytes() for child in self.engine_processes()]
        return bool(variables) and not any(b"MULTIPROC_METHOD=spawn" in each for each in variables)
