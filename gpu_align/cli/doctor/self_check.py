"""Drafts for a perfect prediction: ``python -m gpu_align.cli.doctor.self_check cpu``.

`doctor` runs it in a process of its own. A crash ends that process alone, and the loops run as plain Python there:
compiling them, which a server does once and keeps, takes half a minute.
"""

from __future__ import annotations

import os
import subprocess
import sys

from gpu_align.cli.doctor.finding import Finding
from gpu_align.cli.doctor.fixes import ROOT

#: Seconds; kernels are compiled on a GPU's first use.
_TIME_LIMIT = {"cpu": 60, "cuda": 300}


def draft_for_a_prediction(device: str) -> Finding:
    """Draft for a perfect prediction, in this process: the draft must be its continuation."""
    what = f"drafting on {device}"
    try:
        import torch

        import gpu_align

        prediction = list(range(10, 30))
        drafter = gpu_align.Drafter(
            max_slots=1,
            max_context_len=64,
            max_prediction_len=64,
            num_draft_tokens=8,
            vocab_size=64,
            device=device,
        )
        drafter.add(0, prediction=prediction, prompt_len=1)
        token_ids = torch.zeros((1, 64), dtype=torch.int32)
        token_ids[0, :3] = torch.tensor([1, *prediction[:2]])
        draft = drafter.propose(
            token_ids.to(device),
            torch.tensor([3], dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.ones(1, dtype=torch.int32, device=device),
        )
        length = int(draft.length[0])
        drafted = draft.token_ids[0, :length].tolist()
    except Exception as error:  # every failure here is a finding
        return Finding(what, one_line(error), ok=False)
    expected = prediction[2:10]
    if not drafted or drafted != expected[: len(drafted)]:
        return Finding(what, f"expected a draft of {expected}, found {drafted}", ok=False)
    return Finding(what, f"{len(drafted)} of {len(expected)} tokens of a test prediction", ok=True)


def one_line(error: BaseException) -> str:
    """An error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class SelfCheck:
    """`draft_for_a_prediction` in a process that starts now; `finding` waits for it."""

    def __init__(self, device: str) -> None:
        self._device = device
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, device],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(paths)},
        )

    def finding(self) -> Finding:
        what, limit = f"drafting on {self._device}", _TIME_LIMIT[self._device]
        try:
            printed, errors = self._process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.stop()
            return Finding(what, f"no draft within {limit} s", ok=False)
        state, _, found = printed.strip().rpartition("\n")[2].partition("\t")
        if state not in ("ok", "FAIL"):
            last = errors.strip().rpartition("\n")[2]
            return Finding(what, f"exit code {self._process.returncode}: {last}", ok=False)
        return Finding(what, found, ok=state == "ok")

    def stop(self) -> None:
        """End the process, if it has not ended."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


if __name__ == "__main__":
    result = draft_for_a_prediction(sys.argv[1])
    print("ok" if result.ok else "FAIL", result.found, sep="\t")
