"""The demo's page in a real browser: what it plays and shows is what the step logs say."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from gpu_align.tools.step_log import StepLog
from tests.vllm_integration import demo_recording
from vllm_integration.demo.page import CONTEXT, EDITED, NONE, VERBATIM, Row

ROWS = (EDITED, VERBATIM, CONTEXT)


def _chromium() -> str | None:
    """An installed Chromium or Chrome: $GPU_ALIGN_CHROMIUM, on the path, or Playwright's own."""
    if given := os.environ.get("GPU_ALIGN_CHROMIUM"):
        return given
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((found for name in names if (found := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="not installed: playwright")
    with sync_api.sync_playwright() as playwright:
        path = _chromium() or playwright.chromium.executable_path
        if not Path(path).is_file():
            pytest.skip("no Chromium: `apt-get install chromium`, or `playwright install chromium`")
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        running = playwright.chromium.launch(executable_path=path, args=flags)
        yield running
        running.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[str, Row]:
    return {row.name: row for row in demo_recording.rows(folder)}


@pytest.fixture(scope="module")
def url(folder: Path) -> str:
    return demo_recording.render(folder).as_uri()


class Opened:
    """The page in a context of its own, and everything that it asked for or complained about."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url)

    def text(self, selector: str) -> str:
        content: str = self.page.text_content(selector)
        return content

    def set_slider(self, selector: str, value: int) -> None:
        """As a pointer does it: the value changes, then the event."""
        script = "(s, v) => { s.value = v; s.dispatchEvent(new Event('input', {bubbles: true})); }"
        self.page.eval_on_selector(selector, script, value)

    def choose(self, name: str) -> None:
        self.page.check(f"#choice input[value={name}]")


@pytest.fixture
def opened(browser: Any, url: str) -> Iterator[Opened]:
    """The page; at the end it has loaded nothing but itself, and complained about nothing."""
    opened = Opened(browser, url)
    yield opened
    opened.context.close()
    assert opened.requests == [url]
    assert opened.complaints == []


# --- the playback and the step log ----------------------------------------------------------------------


def _text_after(log: StepLog, num_steps: int) -> str:
    return "".join((s.accepted_text or "") + (s.own_text or "") for s in log.steps[:num_steps])


@pytest.mark.parametrize("name", ROWS)
def test_the_playback_agrees_with_the_step_log(
    opened: Opened, rows: dict[str, Row], folder: Path, name: str
) -> None:
    log, row, none = demo_recording.step_log(name, folder), rows[name], rows[NONE]
    tokens_after = [0, *accumulate(len(step.new) for step in log.steps)]
    opened.choose(name)
    axis = max(rows[each].seconds for each in (NONE, *ROWS))
    seen = set()
    width = row.seconds / axis * 1000  # of the slider's 1000 positions
    for value in sorted({0, 500, 1000, *(int(width * part / 10) + 1 for part in range(1, 11))}):
        opened.set_slider("#time", value)
        now = value / 1000 * axis
        passes = min(len(log.steps), int((now + 5e-7) / row.seconds * len(log.steps)))
        own = min(none.steps, int((now + 5e-7) / none.seconds * none.steps))
        assert opened.text("#clock") == f"{now:.2f} s of {axis:.2f} s"
        finished = "finished: " if passes == len(log.steps) else ""
        assert opened.text("#pane-row .state") == (
            f"{finished}{tokens_after[passes]} of {log.output_tokens} tokens, {passes} of {len(log.steps)} passes"
        )
        assert opened.text("#pane-none .state").removeprefix("finished: ") == (
            f"{own} of {none.steps} tokens, {own} of {none.steps} passes"
        )
        for pane, expected in (
            ("row", _text_after(log, passes)),
            ("none", "".join(_pieces(none.answer.token_ids[:own]))),
        ):
            script = "spans => spans.map(span => span.textContent).join('')"
            assert opened.page.eval_on_selector_all(f"#pane-{pane} .o:not(.todo)", script) == expected
        seen.add(passes)
    assert 0 in seen
    assert len(log.steps) in seen
    assert len(seen) > 5  # and others between


def _pieces(ids: list[int]) -> list[str]:
    tokenizer = demo_recording.recorded_tokenizer()
    return [tokenizer.token_bytes(token).decode() for token in ids]


# Goes through all passes with the slider and reads what is shown of each.
_READ_PASSES = """root => { const slider = root.querySelector(".pass"), texts = (selector) =>
    [...root.querySelectorAll(selector)].map(e => e.textContent), shown = [];
  for (let i = 0; i <= Number(slider.max); i += 1) {
    slider.value = i; slider.dispatchEvent(new Event("input"));
    shown.push({ summary: texts(".summary")[0], why: texts(".why")[0], facts: texts(".facts dd"),
      output: Object.fromEntries(
        ["accepted", "rejected", "unverified", "own"].map(n => [n, texts(".now ." + n)[0]])),
      place: root.querySelector(".place").hidden ? null : texts(".place .matched, .place .o") });
  }
  return shown; }"""


@pytest.mark.parametrize("name", [*ROWS, "a draft budget"])
def test_every_pass_is_that_of_the_step_log(browser: Any, tmp_path: Path, name: str) -> None:
    rows = demo_recording.rows(tmp_path)
    log = next(row.log for row in rows if row.name == (name if name in ROWS else EDITED))
    assert log is not None
    unverified = 0
    if name not in ROWS:  # with the recorded settings every draft is verified
        number = next(i for i, step in enumerate(log.steps) if step.rejected > 2)
        log.steps[number] = replace(log.steps[number], verified=log.steps[number].accepted + 1)
        unverified = 1
    opened = Opened(browser, demo_recording.render(tmp_path, rows).as_uri())
    opened.choose(name if name in ROWS else EDITED)
    passes = opened.page.eval_on_selector("#explorer", _READ_PASSES)
    assert len(passes) == len(log.steps)
    at_place = 0
    for number, (step, shown) in enumerate(zip(log.steps, passes, strict=True)):
        drafts = f"{len(step.proposed)} proposed, {step.accepted} accepted, {step.rejected} rejected"
        assert shown["summary"] == (
            f"Pass {number + 1} of {len(log.steps)}: {drafts if step.proposed else 'no drafts'}; "
            f"{len(step.new)} token{'s' if len(step.new) > 1 else ''} written."
        )
        output = shown["output"]
        assert output["accepted"] == step.accepted_text
        assert output["own"] == step.own_text
        # In the log the proposed text is one; on the page it is cut where acceptance and verification end.
        assert output["accepted"] + output["rejected"] + output["unverified"] == step.proposed_text
        assert output["rejected"] == "".join(_pieces(step.proposed[step.accepted : step.verified]))
        unverified -= output["unverified"] != ""
        if log.prediction_tokens:
            assert f"{step.cursor_before} → {step.cursor_after} of {log.prediction_tokens}" in shown["facts"]
        if step.candidate is None:
            continue
        assert shown["why"] == f"Why there: {step.candidate['why']}."
        if step.source not in ("prediction", "context"):
            assert shown["place"] is None
            continue
        assert shown["facts"][0].startswith(f"token {step.candidate['position']} of ")
        assert shown["facts"][1] == str(step.candidate["matched"])
        matched, drafted = shown["place"]
        # The tokens before the place are those that the output ends with.
        prompt = "".join(_pieces(demo_recording.prompt_token_ids()))
        assert (prompt + _text_after(log, number)).endswith(matched)
        at_place += drafted == step.proposed_text
    # Where an edit is repeated the draft is not what stands at its place.
    assert at_place > 0.9 * sum(step.source in ("prediction", "context") for step in log.steps)
    assert unverified == 0
    opened.context.close()


# --- your own before and after --------------------------------------------------------------------------

_FUNCTION = "def area(width, height):\n    return width * height\n\n\n"
PAIRS = {
    "equal": (_FUNCTION * 4, _FUNCTION * 4),
    "renamed": (
        _FUNCTION * 3 + "print(area(2, 3))\n",
        _FUNCTION.replace("width", "w") * 3 + "print(area(2, 3))\n",
    ),
    "nothing before": ("", "a b a b a b a b\n"),
    "nothing after": ("a b\n", ""),
    "unrelated": ("one two three\n", _FUNCTION),
    "other alphabets": ("naïve 日本 🌱 é\r\n\ttab  \n", "naïve 日本語 🌱🌱 é\r\n\ttab  \n12345"),
    "markup": ("<b>&amp;</b>\n", "<script>alert(1)</script>&amp;</b>\n"),
}


@pytest.mark.parametrize("num_draft_tokens", [1, 32])
def test_a_pasted_edit_is_replayed(opened: Opened, num_draft_tokens: int) -> None:
    """What its passes write is the text after the edit; where both are equal, in the fewest passes."""
    opened.page.fill("#num-draft-tokens", str(num_draft_tokens))
    for name, (before, after) in PAIRS.items():
        opened.page.fill("#before", before)
        opened.page.fill("#after", after)
        opened.page.click("#yours button")
        # A text area has line feeds only.
        texts = [text.replace("\r\n", "\n") for text in (before, after)]
        cut = [opened.page.evaluate("tokenize", text) for text in texts]
        assert ["".join(tokens) for tokens in cut] == texts
        shown = [p["output"] for p in opened.page.eval_on_selector("#yours-explorer", _READ_PASSES)]
        assert "".join(p["accepted"] + p["own"] for p in shown) == texts[1] + "<end>", name
        tokens = len(cut[1]) + 1
        assert opened.text("#yours-result").startswith(f"{tokens} token"), name
        assert f"in {len(shown)} pass" in opened.text("#yours-result"), name
        if name == "equal":
            assert len(shown) == 1 + -(-(tokens - 1) // (num_draft_tokens + 1))
