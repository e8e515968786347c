"""Draws the pictures of the documentation: ``python docs/img/draw.py`` writes the SVG files beside it.

Everything in them is computed: alignments, rows, matches and drafts come from the library's own operations, the
curves from its survival table. The pictures have no background; their boxes have a fill of their own, and their
labels are a grey that is legible on white and on black.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import torch

from gpu_align.drafter.survival import SHIPPED, fit_curves, read_survival
from gpu_align.ops.align import MATCH_WEIGHT, rank_of
from gpu_align.ops.choose import (
    ALIGNMENT_CONTEXT,
    ALIGNMENT_FAR,
    LENGTH_EDGES,
    MARGIN_EDGES,
    SURVIVAL_ONE,
    pack_class,
)
from gpu_align.ops.lcs import lcs_prefix_row

GREY = "#757c86"
INK = "#1f2328"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SANS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
#: name -> (fill, stroke)
COLOURS = {
    "match": ("#b9e6c3", "#3f9b57"),
    "delete": ("#ffd3cd", "#c9534a"),
    "insert": ("#cfe2ff", "#4c7fd0"),
    "draft": ("#ffe6b8", "#c98a1b"),
    "plain": ("#e7eaee", "#98a2ad"),
}
CHAR, PAD, GAP, BOX = 7.9, 6.0, 3.0, 26.0  # px: a character, beside the text, between boxes, a box's height


def _tokens(text: str) -> list[str]:
    return text.split(" ")


#: The worked example of docs/alignment.md in Tekken's tokens: ␣ is a space, ↵ a line end.
PREDICTION = _tokens(
    "def ␣load (path ):↵ ␣␣␣ ␣print (path )↵ ␣␣␣ ␣with ␣open (path ) ␣as ␣f :↵ ␣␣␣␣␣␣␣ ␣return ␣f .read ()↵"
)
OUTPUT = _tokens("def ␣load (path , ␣mode ):↵ ␣␣␣ ␣with ␣open (path ) ␣as ␣f :↵ ␣␣␣␣␣␣␣ ␣return ␣f .read ()↵")
#: Tokens of `OUTPUT` that are there when the pictured step begins.
STEP = 8


class Picture:
    """An SVG document that grows by one element a call."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, text: str, kind: str, width: float | None = None, size: float = 13
    ) -> float:
        """A token; returns where the next one goes."""
        width = _width(text) if width is None else width
        fill, stroke = COLOURS[kind]
        dash = ' stroke-dasharray="4 2"' if kind == "draft" else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BOX:.0f}" rx="4" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="1.3"{dash}/>'
        )
        self.text(x + width / 2, y + 17.5, text, INK, size, mono=True, anchor="middle")
        return x + width + GAP

    def text(
        self,
        x: float,
        y: float,
        text: str,
        fill: str = GREY,
        size: float = 13,
        mono: bool = False,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-family="{MONO if mono else SANS}" font-size="{size:g}" '
            f'fill="{fill}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def line(
        self, points: Iterable[tuple[float, float]], stroke: str = GREY, width: float = 1.5, more: str = ""
    ) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}" {more}/>'
        )

    def bracket(self, x0: float, x1: float, y: float, label: str, stroke: str, up: bool = False) -> None:
        tick = -5 if up else 5
        self.line([(x0, y), (x0, y + tick), (x1, y + tick), (x1, y)], stroke)
        self.text((x0 + x1) / 2, y - 11 if up else y + 21, label, anchor="middle")

    def arrow(self, x0: float, y0: float, x1: float, y1: float, stroke: str = GREY) -> None:
        self.line([(x0, y0), (x1, y1)], stroke, 1.5, 'marker-end="url(#tip)"')

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" role="img">'
        )
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{GREY}"/></marker></defs>'
        )
        return "\n".join([head, f"<title>{escape(self.title)}</title>", tip, *self.parts, "</svg>\n"])


def _width(text: str) -> float:
    return len(text) * CHAR + 2 * PAD


def _ids(*texts: Sequence[str]) -> list[torch.Tensor]:
    """Tokens as [1, n] int32 ids, the same id for the same token."""
    ids = {token: i for i, token in enumerate(dict.fromkeys(t for text in texts for t in text))}
    return [torch.tensor([[ids[t] for t in text]], dtype=torch.int32) for text in texts]


def _int32(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32)


def _scores(output: Sequence[str]) -> list[int]:
    """The alignment's score for every prefix of the prediction; the cursor is at its maximum."""
    context, prediction = _ids(output, PREDICTION)
    row = lcs_prefix_row(context, _int32(len(output)), prediction, _int32(len(PREDICTION)))[0].tolist()
    return [MATCH_WEIGHT * h - j for j, h in enumerate(row)]


def _match(output: Sequence[str], text: Sequence[str], cursor: int) -> tuple[int, int]:
    """End and length of the longest suffix of `output` in `text`."""
    lengths = {
        end: next((i for i in range(min(end, len(output))) if text[end - 1 - i] != output[-1 - i]), end)
        for end in range(1, len(text))
    }
    end = max(lengths, key=lambda end: (lengths[end], -rank_of(end, cursor)))
    return end, lengths[end]


def draw_alignment() -> Picture:
    """Prediction above, output below, and after it the draft of the step."""
    output = OUTPUT[:STEP]
    end, length = _match(output, PREDICTION, _scores(output).index(max(_scores(output))))
    inserted = OUTPUT[3:5]
    shown = 16
    picture = Picture(916, 216, "A prediction aligned with the output, and the drafts that follow")
    top, bottom = 58.0, 112.0
    picture.text(8, top + 17.5, "prediction", bold=True)
    picture.text(8, bottom + 17.5, "output", bold=True)

    x = 98.0
    left: list[float] = []
    for j, token in enumerate(PREDICTION[:shown]):
        if j == 3:
            start = x
            for t in inserted:
                x = picture.box(x, bottom, t, "insert")
            picture.bracket(start, x - GAP, bottom + BOX + 5, "insertion", COLOURS["insert"][1])
        kind = "delete" if 4 <= j < end - length else "match" if j < end else "draft"
        left.append(x)
        if kind != "delete":
            picture.line([(x + _width(token) / 2, top + BOX), (x + _width(token) / 2, bottom)])
            picture.box(x, bottom, token, kind)
        x = picture.box(x, top, token, kind)
    picture.text(x + 2, top + 17.5, "…", bold=True)
    picture.text(x + 2, bottom + 17.5, "…", bold=True)
    picture.bracket(left[4], left[end - length] - GAP, top - 5, "deletion", COLOURS["delete"][1], up=True)
    picture.bracket(left[end], x - GAP, bottom + BOX + 5, "draft of this step", COLOURS["draft"][1])
    suffix = COLOURS["match"][1]
    picture.bracket(left[end - length], left[end] - GAP, bottom + BOX + 5, "matched suffix", suffix)
    note = "The engine verifies all draft tokens in one forward pass and keeps those the model agrees with."
    picture.text(98, 208, note, size=13)
    return picture


def draw_cursor() -> Picture:
    """The score along the prediction, at two moments of the example."""
    picture = Picture(916, 330, f"The cursor is where {MATCH_WEIGHT}H[j] - j is largest")
    x0, unit, y0 = 60.0, 8.0, 234.0
    lefts, x = [], x0
    for token in PREDICTION:
        lefts.append(x)
        x += _width(token) * 0.86 + GAP
    lefts.append(x)
    for value in range(0, 25, 6):
        y = y0 - unit * value
        picture.line([(x0 - 6, y), (x, y)], GREY, 0.4)
        picture.text(x0 - 12, y + 4.5, f"{value}".replace("-", "−"), anchor="end", size=12)
    picture.text(8, 18, f"{MATCH_WEIGHT}H[j] − j", bold=True)
    moments = ((STEP + 3, "draft", "after “)”, three tokens later"), (STEP, "insert", "after “␣with”"))
    for (count, kind, label), label_x, label_y in zip(moments, (640, 640), (64, 214), strict=True):
        scores = _scores(OUTPUT[:count])
        points = [(lx, y0 - unit * s) for lx, s in zip(lefts, scores, strict=True)]
        stroke = COLOURS[kind][1]
        picture.line(points, stroke, 2.2)
        cursor = scores.index(max(scores))
        cx, cy = points[cursor]
        picture.parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="5" fill="{stroke}"/>')
        picture.text(cx, cy - 11, f"cursor {cursor}", stroke, anchor="middle", bold=True)
        picture.text(label_x, label_y, label, stroke, bold=True)
    y = 284.0
    for token, lx, nx in zip(PREDICTION, lefts, lefts[1:], strict=False):
        picture.box(lx, y, token, "plain", nx - lx - GAP, size=11)
    return picture


def draw_wavefront() -> Picture:
    """The example's divergence: lanes hold words of the row, turns go down; a carry enters the next lane a turn
    later. Words of four bits, each `1` where the prediction's token leaves the LCS as it is."""
    anchor, words, word, tokens, now = 3, 4, 4, 5, 4
    context, prediction = _ids(OUTPUT[anchor : anchor + tokens], PREDICTION[anchor : anchor + words * word])
    picture = Picture(916, 330, "The wavefront of a divergence: a carry moves one lane a turn")
    x0, y0, width, height, step_x, step_y = 70.0, 56.0, 164.0, 30.0, 194.0, 32.0
    for w in range(words):
        middle, begin = x0 + w * step_x + width / 2, anchor + w * word
        picture.text(middle, 22, f"lane {w}: word {w}", anchor="middle", size=13, bold=True)
        shown = " ".join(PREDICTION[begin : begin + word])
        picture.text(middle, 42, shown, anchor="middle", size=10, mono=True)
    for d in range(tokens + words - 1):
        y = y0 + d * step_y
        picture.text(58, y + 19, f"turn {d}", anchor="end", bold=d == now)
        for w in range(max(d - tokens + 1, 0), min(d + 1, words)):
            t, x = d - w, x0 + w * step_x
            row = lcs_prefix_row(context, _int32(t + 1), prediction, _int32(words * word))[0]
            bits = "".join(str(1 - rise) for rise in row.diff()[w * word : (w + 1) * word].tolist())
            fill, stroke = COLOURS["draft" if d == now else "match" if d < now else "plain"]
            picture.parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.0f}" height="{height - 4:.0f}" rx="4" '
                f'fill="{fill}" stroke="{stroke}" stroke-width="1.3"/>'
            )
            label = f"{OUTPUT[anchor + t]} → {bits}"
            picture.text(x + width / 2, y + 18, label, INK, size=12, mono=True, anchor="middle")
            if w + 1 < words:
                picture.arrow(x + width, y + 16, x + step_x - 1, y + step_y + 9)
    for x, label, kind in ((70, "finished", "match"), (138, "now: all lanes at once", "draft")):
        picture.text(x, 322, label, COLOURS[kind][1], bold=True)
    picture.text(310, 322, "pending", bold=True)
    return picture


def draw_ties() -> Picture:
    """Three matches of equal length; the one nearest to the cursor wins."""
    prediction = _tokens("if ␣a : ␣return ↵ if ␣b : ␣return ↵ if ␣c : ␣return ↵ ␣run ()")
    output = _tokens("if ␣a : ␣return ↵ if ␣z : ␣return ↵")
    context, tokens = _ids(output, prediction)
    row = lcs_prefix_row(context, _int32(len(output)), tokens, _int32(len(prediction)))[0].tolist()
    scores = [MATCH_WEIGHT * h - j for j, h in enumerate(row)]
    cursor = scores.index(max(scores))
    end, length = _match(output, prediction, cursor)
    picture = Picture(826, 222, "Matches of equal length: the one nearest to the cursor wins")
    top, bottom = 52.0, 150.0
    picture.text(8, top + 17.5, "prediction", bold=True)
    picture.text(8, bottom + 17.5, "output", bold=True)
    x, lefts = 98.0, []
    for j, token in enumerate(prediction):
        lefts.append(x)
        x = picture.box(
            x, top, token, "match" if end - length <= j < end else "draft" if j >= end else "plain"
        )
    for other in (5, 10, 15):
        away = abs(other - cursor)
        label = f"{length} tokens, " + (f"{away} from the cursor" if away else "at the cursor")
        colour = COLOURS["plain" if away else "match"][1]
        picture.bracket(lefts[other - length], lefts[other] - GAP, top - 5, label, colour, up=True)
    tip = lefts[cursor] - GAP / 2
    picture.arrow(tip, top + BOX + 26, tip, top + BOX + 3)
    picture.text(tip, top + BOX + 41, f"cursor {cursor}", anchor="middle", bold=True)
    picture.bracket(lefts[end] + 6, x - GAP, top + BOX + 5, "draft from here", COLOURS["draft"][1])
    x, marks = 98.0, []
    for i, token in enumerate(output):
        marks.append(x)
        x = picture.box(x, bottom, token, "match" if i >= len(output) - length else "plain")
    picture.bracket(marks[-length], x - GAP, bottom + BOX + 5, "suffix", COLOURS["match"][1])
    return picture


def draw_survival() -> Picture:
    """Survival curves of the shipped table for a few classes."""
    K = 64
    curves = fit_curves(read_survival(SHIPPED)[0], K) / SURVIVAL_ONE

    def class_id(matched: int, margin: int, place: int = 0, trust: int = 2) -> int:
        return pack_class(bisect(LENGTH_EDGES, matched), bisect(MARGIN_EDGES, margin), place, trust)

    dashed, dotted = 'stroke-dasharray="6 4"', 'stroke-dasharray="2 3"'
    shown = [
        (class_id(64, 64), "64 or more tokens, at the cursor", "#2f6fd0", ""),
        (class_id(16, 16), "13–16 tokens, at the cursor", "#4c90e0", ""),
        (class_id(4, 4), "4 tokens, at the cursor", "#8a63d2", ""),
        (class_id(2, 2), "2 tokens, at the cursor", "#b0519f", ""),
        (class_id(1, 1), "1 token, at the cursor", "#c9534a", ""),
        (class_id(4, 4, ALIGNMENT_FAR), "4 tokens, far from the cursor", "#8a63d2", dashed),
        (class_id(4, 0, place=0), "4 tokens, runner-up of 4", "#8a63d2", dotted),
        (class_id(4, 4, ALIGNMENT_CONTEXT), "4 tokens, in the context", "#c98a1b", dashed),
        (class_id(4, 4, trust=0), "4 tokens, low adherence", "#757c86", dotted),
    ]
    picture = Picture(880, 400, "Survival: probability that the first k draft tokens are all accepted")
    x0, y0, width, height = 64.0, 350.0, 510.0, 310.0

    def at(k: float, p: float) -> tuple[float, float]:
        return x0 + width * k / K, y0 - height * p

    for p in (0, 0.25, 0.5, 0.75, 1):
        picture.line([at(0, p), at(K, p)], GREY, 0.5)
        picture.text(x0 - 8, at(0, p)[1] + 4.5, f"{p:.2f}", anchor="end", size=12)
    for k in (1, 8, 16, 32, 48, 64):
        picture.text(at(k, 0)[0], y0 + 18, f"{k}", anchor="middle", size=12)
    picture.text(x0 + width / 2, y0 + 38, "k draft tokens", anchor="middle")
    picture.text(x0 - 50, 24, "P(first k draft tokens all accepted)", bold=True)
    ends = []
    for i, label, colour, more in shown:
        picture.line([at(k + 1, p) for k, p in enumerate(curves[i])], colour, 2, more)
        ends.append((at(K, float(curves[i][K - 1]))[1], label, colour))
    # Labels beside the curves' ends, pushed apart where they would touch.
    lowest = 0.0
    for y, label, colour in sorted(ends):
        lowest = max(y, lowest + 18)
        picture.line([(x0 + width, y), (x0 + width + 18, lowest)], colour, 0.8)
        picture.text(x0 + width + 22, lowest + 4.5, label, colour, bold=True)
    return picture


PICTURES = {
    "alignment.svg": draw_alignment,
    "cursor.svg": draw_cursor,
    "wavefront.svg": draw_wavefront,
    "ties.svg": draw_ties,
    "survival.svg": draw_survival,
}


def main() -> None:
    folder = Path(__file__).parent
    for name, draw in PICTURES.items():
        (folder / name).write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
