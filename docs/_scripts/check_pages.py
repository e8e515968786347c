"""Checks the built site: no block is wider than the page, and every link leads somewhere.

::

    mkdocs build --strict && python docs/_scripts/check_pages.py site

prints a line a finding and exits with 1 if there is one. Links to other hosts are not fetched;
anchors and files are looked up in the site.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Characters of code that fit on a page of 74 rem beside both side bars.
MAX_COLUMNS = 112
#: Theme parts that are not ours, and the page that no page links to.
NOT_OURS = {"404.html"}


class Page(HTMLParser):
    """The anchors and links of a page, and its blocks of code as text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.blocks: list[str] = []
        self._in_block = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors.update(value for name in ("id", "name") if (value := values.get(name)))
        link = values.get("href" if tag in ("a", "link") else "src")
        if link:
            self.links.append(link)
        if tag == "pre":
            self._in_block += 1
            self.blocks.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre":
            self._in_block -= 1

    def handle_data(self, data: str) -> None:
        if self._in_block:
            self.blocks[-1] += data


def findings(site: Path) -> Iterator[str]:
    """A line for each block that is too wide and each link that leads nowhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site)
        if str(name) in NOT_OURS:
            continue
        for block in page.blocks:
            wide = max(block.splitlines(), key=len, default="")
            if len(wide) > MAX_COLUMNS:
                yield f"{name}: a line of {len(wide)} columns, at most {MAX_COLUMNS} fit: {wide[:60]}…"
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            known = {other.resolve(): other for other in pages}
            if not target.exists():
                yield f"{name}: {link} leads to no file"
            elif (
                parts.fragment
                and target in known
                and unquote(parts.fragment) not in pages[known[target]].anchors
            ):
                yield f"{name}: {link} leads to no anchor"


def main(site: Path) -> int:
    if not (site / "index.html").exists():
        print(f"{site}: expected a built site, found no index.html", file=sys.stderr)
        return 2
    found = list(findings(site))
    print("\n".join(found) or "every block fits, every link leads somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "site")))
