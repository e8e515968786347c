"""``python -m gpu_align`` is ``gpu-align``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("gpu_align.tools", run_name="__main__", alter_sys=True)
