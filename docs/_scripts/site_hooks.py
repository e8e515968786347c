"""Hooks of MkDocs: the site loads nothing from elsewhere, also where its theme would."""

from __future__ import annotations

from typing import Any

#: What the theme loads so that the search works from disk, and what this site has for it.
_SHIM, _OWN = "https://unpkg.com/iframe-worker/shim", "worker_from_disk.js"


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Put our own script, which lies beside the front page, in the place of the theme's."""
    return output.replace(_SHIM, "../" * page.url.count("/") + _OWN)


def on_post_template(output_content: str, **_: Any) -> str:
    """The same for the page of a server that finds none."""
    return output_content.replace(_SHIM, "/" + _OWN)
