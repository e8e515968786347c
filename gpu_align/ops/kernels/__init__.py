"""Triton kernels. What a function computes stands, as a loop, at its twin in `reference`; here is what differs."""
