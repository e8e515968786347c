"""The rows: a drafter each, with and without the views of what the conversation holds, and earlier answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.agents.forms import Exchange
from benchmarks.agents.readers import Message
from benchmarks.quality.replays import bound, everywhere, replay_batched
from benchmarks.quality.runs import Counts, Knowledge, Run, policy_of
from gpu_align import Recipes, views
from gpu_align.recipes import learn
from gpu_align.simulate import Record, replay
from gpu_align.tools.simulate.policies import OURS, SHIPPED_PACK, tokenized_pack

TOKENIZER = "tekken"
#: Draft tokens a step.
K = 32
#: Most tokens of views a request holds; those of the newest messages come first.
CAPACITY = 16_384


class Row(NamedTuple):
    """A drafter, and whether it is given the views, and a pack learned from the other half's answers."""

    policy: str
    views: bool = False
    learned: bool = False

    @property
    def name(self) -> str:
        return self.policy + ", views" * self.views + ", learned" * self.learned


ROWS = (
    Row(OURS),
    Row(OURS, views=True),
    Row(OURS, views=True, learned=True),
    Row("suffix_decoding_4_deep"),
    Row("suffix_decoding_4_deep", views=True),
    Row("suffix_decoding_4_deep_cached", views=True),
    Row("suffix_decoding_deep"),
    Row("suffix_decoding_deep", views=True),
    Row("suffix_decoding_vllm"),
    Row("prompt_lookup"),
    Row("prompt_lookup_vllm_v2"),
)
#: What no drafter exceeds that copies from one position behind the last token, with the best choice at each step.
BOUND = "bound"
BOUNDS = (Row(BOUND), Row(BOUND, views=True))


def records_of(exchanges: Sequence[Exchange], encode: Callable[[str], list[int]]) -> list[Record]:
    """The conversation is the prompt, its views the prediction: `measure` says who gets them."""
    found = []
    for number, exchange in enumerate(exchanges):
        made = viewed(exchange.messages, exchange.tools, encode)
        asked = "".join(f"{message.text}\n\n" for message in exchange.messages)
        prompt, output = (encode(text) for text in (asked, exchange.answer))
        found.append(Record(str(number), prompt, made, output, TOKENIZER))
    return found


def viewed(messages: Iterable[Message], tools: bool, encode: Callable[[str], list[int]]) -> list[int]:
    """What a server makes of all messages, newest first, as far as there is room."""
    found: list[int] = []
    for message in reversed(tuple(messages)):
        for view in views.of_message(message.text, tools, message.is_result):
            found += encode(view)
            if len(found) >= CAPACITY:
                return found[:CAPACITY]
    return found


def knowledge(earlier: Sequence[Exchange], encode: Callable[[str], list[int]]) -> Knowledge:
    """The shipped pack behind one of earlier answers, and those answers; a task is a source."""
    packs = {SHIPPED_PACK: tokenized_pack(SHIPPED_PACK, TOKENIZER)}
    if earlier:
        learned = learn((exchange.task, exchange.answer) for exchange in earlier)
        packs = {"learned": learned.tokenize(lambda words: [encode(word) for word in words]), **packs}
    return Knowledge(Recipes.join(packs), [encode(exchange.answer) for exchange in earlier])


def measure(row: Row, records: Sequence[Record], known: Knowledge) -> Counts:
    """Replay them; ours takes the views for a memory, from which nothing is drafted before it has matched."""
    if not row.views:
        records = [record_without(record) for record in records]
    if row.policy == OURS:
        recipes = known.recipes if row.learned else tokenized_pack(SHIPPED_PACK, TOKENIZER)
        return Counts.of(replay_batched(records, K, batch_size=16, recipes=recipes, memory=row.views))
    if row.policy == BOUND:
        return Counts.of(bound(record, K, partial(everywhere, matched=True)) for record in records)
    policy = policy_of(Run(row.policy, K), records, known)
    return Counts.of(replay(policy, record, K) for record in records)


def record_without(record: Record) -> Record:
    """The same and no prediction."""
    return Record(record.id, record.prompt, [], record.output, record.tokenizer)
