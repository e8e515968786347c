"""Take the pictures of docs/bench.md, docs/img/demo*.png, from the page that `make demo` wrote. Needs Playwright.

python docs/_scripts/demo_screenshots.py demo_out/demo.html [PATH_OF_CHROMIUM]
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 1100
#: name, the section that it begins with (None: the top), its height
SHOTS = (("demo", None, 960), ("demo-steps", "#steps-title", 790))


def main() -> None:
    from playwright.sync_api import sync_playwright

    url = Path(sys.argv[1]).resolve().as_uri()
    chromium = sys.argv[2] if len(sys.argv) > 2 else shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for scheme, suffix in (("light", ""), ("dark", "-dark")):
            for name, start, height in SHOTS:
                page = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme=scheme)
                page.goto(url)
                if start is not None:
                    page.eval_on_selector(start, "title => title.scrollIntoView()")
                page.screenshot(path=ROOT / "docs" / "img" / f"{name}{suffix}.png")
        browser.close()


if __name__ == "__main__":
    main()
