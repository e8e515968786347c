"""Hooks of MkDocs: the site loads nothing from elsewhere, and the commands' page has every option."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import cli_reference

#: What the theme loads so that the search works from disk, and what this site has for it.
_SHIM, _OWN = "https://unpkg.com/iframe-worker/shim", "worker_from_disk.js"
#: With this attribute the theme's script counts the stars of `repo_url` at api.github.com.
_ASKS_GITHUB = 'data-md-component="source"'

#: Page → its weight in the search. The reference has every word many times.
BOOSTS = {"api.md": 0.1, "cli.md": 0.5, "clients.md": 3, "metrics.md": 3, "operate.md": 2}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put the commands into docs/cli.md; weigh a page for the search."""
    page.meta.setdefault("search", {"boost": BOOSTS.get(page.file.src_uri, 1)})
    return markdown.replace(cli_reference.MARK, cli_reference.reference())


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Load our own script, which lies beside the front page, and ask GitHub for nothing."""
    return output.replace(_SHIM, "../" * page.url.count("/") + _OWN).replace(_ASKS_GITHUB, "")


def on_post_template(output_content: str, **_: Any) -> str:
    """The same for the error page."""
    return output_content.replace(_SHIM, "/" + _OWN).replace(_ASKS_GITHUB, "")
