"""``gpu-align doctor``: what is installed, whether drafting works, and what mends it."""

from __future__ import annotations

from gpu_align.cli.doctor.finding import Finding, Verdict, verdict
from gpu_align.cli.doctor.machine import examine
from gpu_align.cli.doctor.report import as_json, show

__all__ = ["Finding", "Verdict", "as_json", "examine", "show", "verdict"]
