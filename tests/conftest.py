"""Shared by all tests: without a GPU the kernels run under Triton's interpreter, with one natively."""

import os

import torch

# Triton decides at decoration time, so this must come before any kernel module is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Two workers on two cores: each test process keeps to itself.
torch.set_num_threads(1)
