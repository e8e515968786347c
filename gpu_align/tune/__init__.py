"""Learn a survival table, and a recipe pack, from one's own traffic: ``gpu-align tune``."""

from gpu_align.tune.packs import Tokens
from gpu_align.tune.report import Report
from gpu_align.tune.table import write_table
from gpu_align.tune.traffic import Traffic, files_of, read_traffic
from gpu_align.tune.tuning import Tuned, replays, tune

__all__ = [
    "Report",
    "Tokens",
    "Traffic",
    "Tuned",
    "files_of",
    "read_traffic",
    "replays",
    "tune",
    "write_table",
]
