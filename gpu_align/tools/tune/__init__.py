"""Learn a survival table, and a recipe pack, from one's own traffic: ``gpu-align tune``."""

from .packs import Tokens
from .tuning import Report, Traffic, Tuned, files_of, read_traffic, replays, tune, write_table

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
