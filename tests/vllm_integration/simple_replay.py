"""The rule of the page's replay once more, in plain Python: what the page's script is compared with."""

from __future__ import annotations

from dataclasses import dataclass

END = "<end>"
MAX_MATCHED, DRAFT_PER_MATCHED = 32, 2


@dataclass(frozen=True)
class ReplayedStep:
    source: str
    proposed: tuple[str, ...]
    accepted: int
    count: int


def replay(prediction: list[str], answer: list[str], num_draft_tokens: int) -> list[ReplayedStep]:
    """The passes that write `answer` and an end token."""
    output = [*answer, END]
    steps: list[ReplayedStep] = []
    done = cursor = 0
    while done < len(output):
        written = output[:done]
        source, text, position, length = "none", [], 0, 0
        if steps and written == prediction[:done]:
            source, text, position, length = "prediction", prediction, done, num_draft_tokens
        elif steps:
            # Longest match; then the prediction; then the place nearest to the cursor; then the first of them.
            places = [
                (-matched(prediction, p, written), 0, abs(p - cursor), p)
                for p in range(1, len(prediction) + 1)
            ]
            places += [(-matched(written, p, written), 1, 0, p) for p in range(1, done)]
            found, is_output, _, place = min(places, default=(0, 0, 0, 0))
            if found:
                source, text = ("context", written) if is_output else ("prediction", prediction)
                position, length = place, min(num_draft_tokens, DRAFT_PER_MATCHED * -found)
        proposed = tuple(text[position : position + length])
        accepted = 0
        while accepted < len(proposed) and proposed[accepted] == output[done + accepted]:
            accepted += 1
        count = min(accepted + 1, len(output) - done)
        if source == "prediction":
            cursor = position + accepted
        if cursor < len(prediction) and prediction[cursor] == output[done + count - 1]:
            cursor += 1
        steps.append(ReplayedStep(source if proposed else "none", proposed, accepted, count))
        done += count
    return steps


def matched(text: list[str], position: int, written: list[str]) -> int:
    """How many of the last tokens of `written` are the same before `position` of `text`."""
    most = min(MAX_MATCHED, position, len(written))
    return next((n for n in range(most) if text[position - 1 - n] != written[-1 - n]), most)
