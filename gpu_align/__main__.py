"""``python -m gpu_align`` is ``gpu-align``."""

import sys

from .tools import main

if __name__ == "__main__":
    sys.exit(main())
