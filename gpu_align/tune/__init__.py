"""Learn a survival table from one's own traffic: ``gpu-align tune``."""

from gpu_align.tune.table import write_table
from gpu_align.tune.traffic import Traffic, files_of, read_traffic
from gpu_align.tune.tuning import Report, Tuned, replays, tune

__all__ = ["Report", "Traffic", "Tuned", "files_of", "read_traffic", "replays", "tune", "write_table"]
