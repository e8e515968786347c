"""``python -m vllm_integration.demo`` is ``gpu-align demo``; ``--out-dir`` is another name of ``--out``."""

import sys

from gpu_align.tools import main

if __name__ == "__main__":
    given = (f"--out{word[9:]}" if word.startswith("--out-dir") else word for word in sys.argv[1:])
    sys.argv[1:] = ["demo", *given]
    sys.exit(main())
