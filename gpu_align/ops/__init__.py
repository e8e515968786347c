"""The operations of a decode step: a launcher each, kernels, references, and mathematics in ``README.md``."""
