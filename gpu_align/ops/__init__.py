"""The operations of a decode step. One folder each: reference, kernels, launcher and the maths (README.md)."""
