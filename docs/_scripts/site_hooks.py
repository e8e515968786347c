"""Hooks of MkDocs: the site loads nothing from elsewhere, and the campaign's page says how old its rows are."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

#: What the theme loads so that the search works from disk, and what this site has for it.
_SHIM, _OWN = "https://unpkg.com/iframe-worker/shim", "worker_from_disk.js"
#: With this attribute the theme's script counts the stars of `repo_url` at api.github.com.
_ASKS_GITHUB = 'data-md-component="source"'
_ROOT = Path(__file__).parents[2]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Behind the commit of a row, say how many have touched the installed packages since."""
    return re.sub(r"<!-- since (\w+) -->", lambda found: f", {commits_since(found[1])}", markdown)


def commits_since(commit: str) -> str:
    """How many commits have touched the installed packages since `commit`, in words."""
    command = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", "gpu_align", "vllm_integration"]
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no Git, or sources without their history
        return "age unknown"
    count = int(done.stdout)
    return f"{count} commit{'s' * (count != 1)} ago" if count else "as it is now"


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Load our own script, which lies beside the front page, and ask GitHub for nothing."""
    return output.replace(_SHIM, "../" * page.url.count("/") + _OWN).replace(_ASKS_GITHUB, "")


def on_post_template(output_content: str, **_: Any) -> str:
    """The same for the error page."""
    return output_content.replace(_SHIM, "/" + _OWN).replace(_ASKS_GITHUB, "")
