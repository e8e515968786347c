"""Support triage: records with real short texts as their free values."""

from __future__ import annotations

from typing import Any

from benchmarks.recipes.changelogs import sentences
from benchmarks.recipes.groups import (
    Group,
    Output,
    Task,
    choice,
    fives,
    happens,
    number_of,
    rendered,
    shuffled,
)
from benchmarks.recipes.packages import PROSE, SPLITS, Shelf

NAME = "triage"
MOST_GROUPS, MOST_OUTPUTS = 400, 300

#: Category → team, sentiment, what the reply says after its first sentence, and the next action.
CATEGORIES = {
    "bug": (
        "engineering",
        "negative",
        (
            "Our engineers have been able to reproduce the problem and are working on a fix. We will write to you "
            "again as soon as a release with the fix is available."
        ),
        "open_issue",
    ),
    "question": (
        "support",
        "neutral",
        (
            "You will find a step-by-step description in our documentation. Please let us know if it does not "
            "answer your question."
        ),
        "send_documentation",
    ),
    "feature_request": (
        "product",
        "positive",
        (
            "We have passed your suggestion on to the product team, who decide on it in the next planning round. "
            "There is nothing that you need to do."
        ),
        "add_to_backlog",
    ),
    "incident": (
        "operations",
        "negative",
        (
            "We are looking into this with the highest priority. You can follow the progress on our status page, "
            "which is updated every 30 minutes."
        ),
        "page_on_call",
    ),
}
#: Priority → hours until the first answer, and whether a person has to look at it.
PRIORITIES = {"low": (72, False), "normal": (24, False), "high": (8, True), "urgent": (1, True)}
AREAS = (
    "api", "billing", "command line", "configuration", "documentation", "logging", "networking", "storage",
)  # fmt: skip
ASK = "\n\nTriage this ticket. Answer with JSON.\n"


def task(shelf: Shelf) -> Task:
    """Groups and outputs whose summaries are of packages of their split."""
    groups, outputs = [], []
    for split in SPLITS:
        found = shuffled(sentences(shelf, PROSE[split]), NAME)
        if split == "train":
            texts = [rendered(record_of(text), NAME, text) for _, text in found * 2]
            groups = [Group(NAME, ASK, samples) for samples in fives(texts)][:MOST_GROUPS]
        else:
            outputs = [
                Output(NAME, f"Ticket {_number(text)}\n\n{text}.{ASK}", rendered(record_of(text), NAME, text))
                for _, text in found[:MOST_OUTPUTS]
            ]
    return Task(groups, outputs)


def _number(text: str) -> int:
    return 10_000 + number_of("ticket", text) % 90_000


def record_of(text: str) -> dict[str, Any]:
    """The triage of a ticket with this summary."""
    category = choice(list(CATEGORIES), "category", text)
    priority = choice(list(PRIORITIES), "priority", text)
    area = choice(AREAS, "area", text)
    team, sentiment, reply, action = CATEGORIES[category]
    hours, human = PRIORITIES[priority]
    return {
        "schema": "support-triage/v2",
        "ticket": {"id": f"TCK-{_number(text)}", "channel": "email", "language": "en"},
        "classification": {
            "category": category,
            "product_area": area,
            "sentiment": sentiment,
            **({"duplicate": False} if happens(0.9, "duplicate", text) else {}),
        },
        "priority": {"level": priority, "first_answer_hours": hours, "needs_human": human},
        "summary": text,
        "entities": {"customer": None, "version": None, "order": None, "deadline": None},
        "suggested_reply": {
            "greeting": "Hello,",
            "body": f"thank you for contacting us about {area}. {reply}",
            "closing": "Kind regards, your support team",
        },
        "next_action": {"type": action, "assignee": team, "notify_customer": True, "attachments": []},
        "status": "triaged",
    }
