"""Shared by all tests: without a GPU the kernels run under Triton's interpreter, with one natively; no recipes."""

import os

import fast_interpreter
import torch

# Triton decides at decoration time, so this must come before any kernel module is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The shipped recipes take an engine seconds to read, and change how many steps an output takes. Tests of recipes
# say which ones they want.
os.environ.setdefault("GPU_ALIGN_RECIPES", "off")

if os.environ.get("TRITON_INTERPRET") == "1":
    fast_interpreter.speed_up()

# Two workers on two cores: each test process keeps to itself.
torch.set_num_threads(1)
