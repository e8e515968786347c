"""``python -m vllm_integration.demo`` is ``gpu-align demo``."""

import sys

from gpu_align.tools import main

if __name__ == "__main__":
    sys.argv.insert(1, "demo")
    sys.exit(main())
