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

from gpu_align.step_log import StepLog
from tests.vllm_integration import demo_recording
from tests.vllm_integration.simple_replay import END, replay
from vllm_integration.demo.page import EDITED, NONE, UNRELATED, VERBATIM, Row

ROWS = (EDITED, VERBATIM, UNRELATED)


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


def test_the_documentation_tells_what_was_recorded(rows: dict[str, Row]) -> None:
    said = f"one edit, {rows[EDITED].steps} passes of the model instead of {rows[NONE].steps}]"
    docs = Path(__file__).parents[2] / "docs" / "bench.md"
    assert docs.read_text(encoding="utf-8").count(said) == 2


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
            ("none", "".join(_pieces(none.token_ids[:own]))),
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


def test_play_runs_in_real_time_and_pauses(browser: Any, url: str) -> None:
    opened = Opened(browser, "about:blank")
    opened.page.clock.install(time=0)
    opened.page.goto(url)
    opened.page.clock.pause_at(60_000)
    opened.page.focus("#play")
    opened.page.keyboard.press("Space")
    opened.page.clock.run_for(1000)
    assert 0.95 < float(opened.text("#clock").split()[0]) <= 1
    opened.page.keyboard.press("Space")
    paused = opened.text("#clock")
    opened.page.clock.run_for(1000)
    assert opened.text("#clock") == paused
    assert opened.page.get_attribute("#play", "aria-label") == "Play on"
    opened.page.keyboard.press("Space")
    opened.page.select_option("#speed", "4")
    opened.page.clock.run_for(500)
    assert 1.8 < float(opened.text("#clock").split()[0]) - float(paused.split()[0]) <= 2
    opened.context.close()
    assert opened.complaints == []


# --- keys, widths, colours ------------------------------------------------------------------------------


def test_every_control_is_reached_by_tab_and_shows_its_focus(opened: Opened) -> None:
    selector = "button:not(:disabled), input, select, textarea, summary, pre[tabindex]"
    script = """() => { const e = document.activeElement; const style = getComputedStyle(e);
        const label = e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.labels?.length ||
            e.textContent;
        return [e.outerHTML.slice(0, 60), style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0,
            !!label, [...document.querySelectorAll(SELECTOR)].indexOf(e)]; }"""
    script = script.replace("SELECTOR", repr(selector))
    reached = set()
    count = len(opened.page.query_selector_all(selector))
    for _ in range(count + 5):
        opened.page.keyboard.press("Tab")
        html, outlined, named, index = opened.page.evaluate(script)
        if index < 0:
            break
        assert outlined, html
        assert named, html
        reached.add(index)
    # Of a group of radio buttons only the checked one is a stop.
    assert len(reached) == count - (len(ROWS) - 1)


def test_keys_and_buttons_choose_a_row_and_a_pass(opened: Opened, folder: Path) -> None:
    assert opened.page.is_checked(f"#choice input[value={EDITED}]")
    for selector in (".accepted", ".rejected"):  # the first pass shown has both
        assert opened.text(f"#explorer .now {selector}")
    assert "finished" in opened.text("#pane-row .state")
    assert "finished" not in opened.text("#pane-none .state")
    opened.set_slider("#explorer .pass", 0)
    log = demo_recording.step_log(EDITED, folder)
    for expected in [i for i, step in enumerate(log.steps) if step.rejected][:5]:
        opened.page.click("#explorer .next-rejection")
        assert opened.text("#explorer .summary").startswith(f"Pass {expected + 1} of")
    opened.page.focus(f"#choice input[value={EDITED}]")
    opened.page.keyboard.press("ArrowRight")
    assert opened.text("#pane-row h3") == "Prediction: the exact answer"
    opened.page.focus("#time")
    opened.page.keyboard.press("End")
    assert "finished" in opened.text("#pane-none .state")
    opened.page.focus("#explorer .pass")
    opened.page.keyboard.press("Home")
    opened.page.keyboard.press("ArrowRight")
    assert opened.text("#explorer .summary").startswith("Pass 2 of")
    assert opened.page.get_attribute("#explorer .pass", "aria-valuetext").startswith("pass 2 of")


# WCAG's contrast of every piece of text with what is behind it; text still to come is faint on purpose.
_CONTRAST = """() => {
  const parse = text => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const part = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => {
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b); };
  const behind = element => { for (let e = element; e; e = e.parentElement) {
    const colour = parse(getComputedStyle(e).backgroundColor); if (colour[3] === 1) return colour; }
    return [255, 255, 255]; };
  const bad = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let checked = 0;
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const e = node.parentElement;
    if (!node.data.trim() || !e.getClientRects().length || e.closest(".todo, script, style, :disabled")) continue;
    const style = getComputedStyle(e);
    const [x, y] = [light(parse(style.color)), light(behind(e))].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.6 && style.fontWeight >= 600);
    checked += 1;
    const contrast = (x + 0.05) / (y + 0.05);
    if (contrast < (large ? 3 : 4.5)) bad.push([e.className, node.data.slice(0, 40), contrast]);
  }
  return [checked, bad]; }"""


@pytest.mark.parametrize(
    ("scheme", "background", "width"),
    [
        ("light", "rgb(255, 255, 255)", 320),
        ("dark", "rgb(13, 17, 23)", 480),
        ("light", "rgb(255, 255, 255)", 768),
    ],
)
def test_text_has_contrast_and_scrolls_in_one_direction(
    browser: Any, url: str, scheme: str, background: str, width: int
) -> None:
    opened = Opened(browser, url, color_scheme=scheme, viewport={"width": width, "height": 800})
    opened.page.eval_on_selector_all("details", "all => all.forEach(one => one.open = true)")
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == background
    checked, bad = opened.page.evaluate(_CONTRAST)
    assert checked > 500
    assert bad == []
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    outside = opened.page.eval_on_selector_all(
        "button, input, select, textarea, h1, h2, h3, p, svg, pre",
        "(all, width) => all.filter(e => e.getClientRects().length && (e.getBoundingClientRect().left < 0 || "
        "e.getBoundingClientRect().right > width)).map(e => e.outerHTML.slice(0, 80))",
        width,
    )
    assert outside == []
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
    opened.page.fill("#num-draft-tokens", str(num_draft_tokens))
    for before, after in PAIRS.values():
        opened.page.fill("#before", before)
        opened.page.fill("#after", after)
        opened.page.click("#yours button")
        # A text area has line feeds only.
        texts = [text.replace("\r\n", "\n") for text in (before, after)]
        cut = [opened.page.evaluate("tokenize", text) for text in texts]
        assert ["".join(tokens) for tokens in cut] == texts
        expected = replay(*cut, num_draft_tokens)
        shown = opened.page.eval_on_selector("#yours-explorer", _READ_PASSES)
        assert [(p["output"]["accepted"], p["output"]["rejected"]) for p in shown] == [
            ("".join(s.proposed[: s.accepted]), "".join(s.proposed[s.accepted :])) for s in expected
        ]
        assert "".join(p["output"]["accepted"] + p["output"]["own"] for p in shown) == texts[1] + END
        tokens = len(cut[1]) + 1
        fewer = f"{tokens / len(expected) + 1e-9:.1f}"  # a tie goes up in JavaScript
        prediction, output = (
            sum(s.accepted for s in expected if s.source == source) for source in ("prediction", "context")
        )
        rejected = sum(len(s.proposed) - s.accepted for s in expected)
        assert opened.text("#yours-result") == (
            f"{tokens} token{'s' if tokens > 1 else ''} in {len(expected)} pass{'es' if len(expected) > 1 else ''}"
            f" instead of {tokens}: {fewer}× fewer. {prediction} drafts accepted from the prediction, {output} "
            f"from the output so far; {rejected} rejected."
        )
