"""A recorded run of the demo: its table, step logs and the tokens they need, for tests of the page.

To record again, after `make demo`, with the folder of the model that it names:

    python -m tests.vllm_integration.demo_recording demo_out .cache/demo-model/<digest>
"""

from __future__ import annotations

import base64
import gzip
import json
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from gpu_align.tools.bench.client import Answer
from gpu_align.tools.simulate.tokenizers import load_tokenizer
from gpu_align.tools.step_log import StepLog, read_step_log
from vllm_integration.demo import page, task

PATH = Path(__file__).with_name("demo_recording.json.gz")
PREDICTIONS = {page.VERBATIM: task.EDITED, page.EDITED: task.ORIGINAL}


@dataclass(frozen=True)
class RecordedTokenizer:
    """The tokens of a recording, and the texts that were cut into them."""

    pieces: dict[int, bytes]
    texts: dict[str, list[int]]
    vocab_size: int
    name: str = "recorded"

    def encode(self, text: str) -> list[int]:
        return self.texts[text]

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


@lru_cache(maxsize=1)
def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(gzip.decompress(PATH.read_bytes()))
    return document


def recorded_tokenizer() -> RecordedTokenizer:
    document = _document()
    pieces = {int(token): base64.b64decode(piece) for token, piece in document["pieces"].items()}
    return RecordedTokenizer(pieces, document["texts"], document["vocab_size"])


def prompt_token_ids() -> list[int]:
    ids: list[int] = _document()["prompt"]
    return ids


def step_log(name: str, folder: Path) -> StepLog:
    """The step log of row `name`, read from a file as the server has written it."""
    path = folder / f"{name}.yaml"
    path.write_text(_document()["logs"][name], encoding="utf-8")
    return read_step_log(path)


def rows(folder: Path) -> list[page.Row]:
    """The rows as the demo has measured them."""
    document = _document()
    return [
        page.Row(
            name := recorded["prediction"],
            Answer(task.EDITED, token_ids=document["answer"], prompt_token_ids=document["prompt"]),
            recorded["wall_s"],
            recorded["steps"],
            recorded["by_source"],
            prediction=PREDICTIONS.get(name),
            log=step_log(name, folder) if name in document["logs"] else None,
        )
        for recorded in document["result"]["rows"]
    ]


def calls() -> list[page.Row]:
    """The rows of the same edit as a tool call: their figures, without texts."""
    return [
        page.Row(row["prediction"], Answer(), row["wall_s"], row["steps"], row["by_source"])
        for row in _document()["result"]["calls"]
    ]


def render(folder: Path, found: list[page.Row] | None = None) -> Path:
    """Write the page of the recorded run, or of rows made from it, and return its path."""
    found = rows(folder) if found is None else found
    path = folder / "demo.html"
    num_draft_tokens = _document()["result"]["num_draft_tokens"]
    path.write_text(page.render(found, calls(), recorded_tokenizer(), "A recorded run.", num_draft_tokens))
    return path


def record(out_dir: Path, model_dir: Path) -> None:
    """Make the recording from what the demo has written, and from its model's tokenizer."""
    from transformers import AutoTokenizer

    from vllm_integration.demo.model import encode_chat

    result = json.loads((out_dir / "demo.json").read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(str(model_dir))
    prompt = encode_chat(AutoTokenizer.from_pretrained(model_dir), task.MESSAGES)
    logs, used = {}, set(prompt)
    for row in result["rows"]:
        if row["step_log"] is None:
            continue
        path = out_dir / "steps" / f"{row['step_log']}.yaml"
        logs[row["prediction"]] = path.read_text(encoding="utf-8")
        log = read_step_log(path)
        answer = [token for step in log.steps for token in step.new]
        used.update(token for step in log.steps for token in step.proposed + step.new)
    texts = {text: tokenizer.encode(text) for text in PREDICTIONS.values()}
    used.update(token for ids in texts.values() for token in ids)
    document = {
        "result": result,
        "logs": logs,
        "prompt": prompt,
        "answer": answer,
        "texts": texts,
        "pieces": {i: base64.b64encode(tokenizer.token_bytes(i)).decode() for i in sorted(used)},
        "vocab_size": tokenizer.vocab_size,
    }
    # The same bytes for the same run: no time, no name.
    PATH.write_bytes(gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    record(Path(sys.argv[1]), Path(sys.argv[2]))
