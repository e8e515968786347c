"""`make demo`: predicted outputs in a real vLLM server, in one command. It is `bench` on a model that it trains.

Importing this package imports neither torch nor vLLM.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["run_demo", "wrong_use"]

#: How the hub writes a model: `name` or `organisation/name`.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def run_demo(model: str | None = None, out_dir: Path = Path("demo_out"), ngram: bool = True) -> int:
    """Serve a model with the plugin, send one edit with different predictions, and compare steps and time.

    Args:
        model: a Hugging Face name or folder; None: a tiny model of our own, made on the first run and kept
            under `.cache/demo-model/` in the current folder.
        out_dir: gets `demo.html`, `demo.json` (the table), the servers' logs, and `steps/` (the engine's step
            log of every request with a prediction).
        ngram: also start a second server, with vLLM's own n-gram drafter.

    Returns:
        The exit code: 0 when every output is identical and, with the tiny model, the verbatim prediction
        needs at least 4 times fewer verification steps and less wall time than no prediction; 1 when not;
        2 when something is missing or the server does not run; 130 after Ctrl-C.
    """
    from .run import run

    return run(model, out_dir, ngram)


def wrong_use(model: str | None, out_dir: Path) -> str | None:
    """Return what is wrong with the two options, or None. Loads nothing and writes nothing."""
    try:
        if model is not None:
            folder = Path(model)
            if folder.is_dir():
                if not (folder / "config.json").is_file():
                    return f"the model {model} is a folder without a config.json"
            elif folder.exists() or not _HUB_NAME.fullmatch(model):
                return f"expected a model as its folder or its Hugging Face name, found {model!r}"
        parent = next(place for place in (out_dir, *out_dir.parents) if place.exists())
        if not parent.is_dir():
            return f"{out_dir}: {parent} is not a folder"
        if not os.access(parent, os.W_OK):
            return f"{out_dir}: {parent} cannot be written to"
    except OSError as error:  # a name that is too long, a folder that may not be read
        return f"{error.filename}: {error.strerror}"
    return None
