"""The operations of a decode step: a launcher each, kernels, references, and the mathematics in ``<op>.md``."""
