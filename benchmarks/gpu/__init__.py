"""One script for a machine with a GPU."""


class SkipError(Exception):
    """Raised by a row that cannot be measured here; the text says why."""
