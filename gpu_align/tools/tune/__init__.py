"""Learn a survival table from one's own traffic: ``gpu-align tune``."""
