"""``python -m gpu_align`` is ``gpu-align``."""

from gpu_align.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
