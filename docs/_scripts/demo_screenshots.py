"""Take the pictures of docs/bench.md from the recorded run: docs/img/demo*.png. Needs Chromium.

python docs/_scripts/demo_screenshots.py [PATH_OF_CHROMIUM]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
WIDTH = 1100
#: name, the section that it begins with (None: the top), its height
SHOTS = (("demo", None, 960), ("demo-steps", "#steps-title", 790))


def main() -> None:
    from playwright.sync_api import sync_playwright

    from tests.vllm_integration import demo_recording

    chromium = sys.argv[1] if len(sys.argv) > 1 else shutil.which("chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        url = demo_recording.render(Path(folder)).as_uri()
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
