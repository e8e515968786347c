"""Measurements: corpora, comparisons with peers, and the scripts that print every figure of the docs."""
