"""``python -m gpu_align.tools`` is ``gpu-align``."""

from . import main

if __name__ == "__main__":
    raise SystemExit(main())
