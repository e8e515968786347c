"""Checks the built site: no block is wider than the page, every link leads somewhere, a page is read in 7 minutes.

::

    mkdocs build --strict && python docs/_scripts/check_pages.py site

prints a line a finding and exits with 1 if there is one; with ``--words`` the words of each page as well. Links to
other hosts are not fetched; anchors and files are looked up in the site.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Characters of code that fit on a page of 74 rem beside both side bars.
MAX_COLUMNS = 112
#: A page that is read from its beginning to its end takes at most so many minutes, at this speed. One page answers
#: one question: with five minutes, four questions had two pages each, which repeated each other.
MAX_MINUTES = 7
WORDS_A_MINUTE = 220
#: Pages in which a name is looked up and that are not read through, with the reason why they are longer.
REFERENCE = {
    "api.html": "made from the docstrings of every public name",
}
#: Theme parts that are not ours, and the page that no page links to.
NOT_OURS = {"404.html"}
#: What is counted: "K = 32" has two words, "`num_draft_tokens`" is one.
WORD = re.compile(r"\w[\w.,'’/-]*")


class Page(HTMLParser):
    """The anchors and links of a page, its blocks of code as text, and the words of its prose.

    Prose is what stands in the ``article``, without blocks of code, tables, scripts, pictures and the links of
    headings.
    """

    #: Elements whose text is no prose; each has an end tag.
    NO_PROSE = frozenset({"pre", "table", "script", "style", "svg", "nav", "button"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.blocks: list[str] = []
        self.words = 0
        self._in_block = self._in_article = self._in_no_prose = 0
        self._in_permalink = False
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
        self._in_article += tag == "article"
        self._in_no_prose += tag in self.NO_PROSE
        self._in_permalink = tag == "a" and "headerlink" in (values.get("class") or "").split()

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre":
            self._in_block -= 1
        self._in_article -= tag == "article"
        self._in_no_prose -= tag in self.NO_PROSE
        if tag == "a":
            self._in_permalink = False

    def handle_data(self, data: str) -> None:
        if self._in_block:
            self.blocks[-1] += data
        if self._in_article and not self._in_no_prose and not self._in_permalink:
            self.words += len(WORD.findall(data))


def findings(site: Path, reference: Mapping[str, str] = REFERENCE) -> Iterator[str]:
    """A line for each block that is too wide, each link that leads nowhere and each page that is too long."""
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
    yield from too_long(
        {path.relative_to(site).as_posix(): page.words for path, page in pages.items()}, reference
    )


def too_long(words: Mapping[str, int], reference: Mapping[str, str]) -> Iterator[str]:
    """A line for each page that takes more than `MAX_MINUTES`, and for each needless exception.

    Args:
        words: page → words of its prose.
        reference: page → why it may be longer.
    """
    most = MAX_MINUTES * WORDS_A_MINUTE
    for name, count in words.items():
        if count > most and name not in reference:
            yield (
                f"{name}: {count:,} words take {count / WORDS_A_MINUTE:.1f} minutes, at most {most:,} words fit "
                f"in {MAX_MINUTES}: split it by reader"
            )
    for name in reference:
        if words.get(name, 0) <= most:
            yield f"{name}: short enough, or no such page: take it out of REFERENCE"


def minutes(site: Path) -> str:
    """The pages with the words of their prose, the longest first."""
    words = {
        path.relative_to(site): Page(path.read_text(encoding="utf-8")).words for path in site.rglob("*.html")
    }
    rows = sorted(words.items(), key=lambda row: (-row[1], row[0]))
    return "\n".join(f"{count:6,}  {count / WORDS_A_MINUTE:4.1f} min  {name}" for name, count in rows)


def main(site: Path, show: bool = False) -> int:
    if not (site / "index.html").exists():
        print(f"{site}: expected a built site, found no index.html", file=sys.stderr)
        return 2
    if show:
        print(minutes(site))
    found = list(findings(site))
    print("\n".join(found) or "every block fits, every link leads somewhere, every page is read in 7 minutes")
    return 1 if found else 0


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--words"]
    raise SystemExit(main(Path(arguments[0] if arguments else "site"), show="--words" in sys.argv))
