"""What the commands of this folder need before they can replay anything: corpora, and the peer's tree."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.corpus import build as corpus
from benchmarks.quality import build_suffix_peer


def make_ready(corpora: Mapping[str, Path]) -> int:
    """Build Arctic's suffix tree, and make the corpora that are not there; what fails is told on stderr.

    Args:
        corpora: name of a set of `benchmarks.corpus` → its file.

    Returns:
        An exit code: 0, or 1 where something could not be built or fetched.
    """
    try:
        build_suffix_peer.build()
    except RuntimeError as error:
        print(f"error: suffix decoding cannot be built to compare with: {error}", file=sys.stderr)
        return 1
    build_suffix_peer.add_to_path()
    return make_corpora(corpora)


def make_corpora(corpora: Mapping[str, Path]) -> int:
    """Make the corpora that are not there: the second half of `make_ready`."""
    for name, path in corpora.items():
        if not path.is_file() and (code := corpus.main([str(path), "--set", name])):
            return code
    return 0
