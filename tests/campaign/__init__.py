"""Programs that attack the library and the plugin for minutes each, and count: see README.md."""

import os
import sys
from pathlib import Path

# As in tests/conftest.py: Triton decides at decoration time, before any kernel module is imported.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("GPU_ALIGN_RECIPES", "off")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The harnesses and oracles of the other tests; last, because tests/gpu_align must not stand for gpu_align.
_TESTS = Path(__file__).parents[1]
for _folder in ("", "gpu_align", "vllm_integration", "vllm"):
    if str(_TESTS / _folder) not in sys.path:
        sys.path.append(str(_TESTS / _folder))
