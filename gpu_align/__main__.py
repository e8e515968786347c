"""``python -m gpu_align`` is ``gpu-align``."""

import importlib
import sys

if __name__ == "__main__":
    # By name: the core imports no tool.
    sys.exit(importlib.import_module("gpu_align.tools").main())
