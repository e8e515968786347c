"""Experiments that others published, run again."""
