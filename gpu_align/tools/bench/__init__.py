"""Measures a server: the same requests without drafts, with predictions, with useless ones, with n-gram drafts.

The command is ``gpu-align bench``; README.md shows which way the data goes.
"""
