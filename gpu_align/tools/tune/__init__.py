"""Learn a survival table, and a recipe pack, from one's own traffic: ``gpu-align tune``."""
