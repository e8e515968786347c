"""The client programs of the documentation, against a server: the same answer, in fewer steps.

LiteLLM and instructor want an older openai package than the other tests, so they live in an environment of their
own: `make clients` installs them and sets the two variables below. Without it these tests are skipped.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.clients import Logs
from tests.vllm.engines import SERVER_K as K
from tests.vllm.engines import Server

pytestmark = pytest.mark.vllm

CLIENTS = Path(__file__).parents[2] / "docs" / "clients"
N = 60  # tokens of each answer
FEWEST = 1 + math.ceil((N - 1) / (K + 1))


def run(command: list[str], server: Server, directory: Path) -> dict[str, list[str]]:
    """What the program printed: a name, then an id and whether the answer was the same."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OPENAI_BASE_URL": f"{server.url}/v1", "MODEL": "tiny", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, cwd=directory, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.strip()]
    return {name: rest for name, *rest in lines}


def check(printed: dict[str, list[str]], names: list[str], server: Server) -> None:
    assert list(printed) == names
    logs = Logs(server.logs)
    for name, (answer_id, same) in printed.items():
        assert same in ("True", "true"), name
        (log,) = logs.of(answer_id, 1, 10)
        usage = log["usage"]
        assert (usage["rejected"], usage["steps"]) == (0, FEWEST), name


def test_openai_python(server: Server, tmp_path: Path) -> None:
    printed = run([sys.executable, str(CLIENTS / "with_openai.py")], server, tmp_path)
    names = ["chat", "chat-stream", "chat-async", "chat-async-stream"]
    check(printed, [*names, "completions", "responses", "responses-stream"], server)


@pytest.fixture(scope="module")
def python_with_clients() -> str:
    python = os.environ.get("GPU_ALIGN_CLIENTS_PYTHON", sys.executable)
    found = subprocess.run([python, "-c", "import litellm, instructor"], capture_output=True, check=False)
    if found.returncode:
        assert "GPU_ALIGN_CLIENTS_PYTHON" not in os.environ, found.stderr.decode()[-2000:]
        pytest.skip("LiteLLM and instructor are not installed: make clients")
    return python


def test_litellm(python_with_clients: str, server: Server, tmp_path: Path) -> None:
    printed = run([python_with_clients, str(CLIENTS / "with_litellm.py")], server, tmp_path)
    names = [
        f"{provider}{mode}" for provider in ("openai", "hosted_vllm") for mode in ("", "-stream", "-async")
    ]
    # LiteLLM gives the chunks of a stream an id of its own; their text was compared.
    streams = [printed.pop(name) for name in names if name.endswith("-stream")]
    assert [same for _, same in streams] == ["True"] * 2
    check(printed, [name for name in names if not name.endswith("-stream")], server)


def test_instructor(python_with_clients: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    byte_server: Server = request.getfixturevalue("byte_server")  # not started for a test that is skipped
    printed = run([python_with_clients, str(CLIENTS / "with_instructor.py")], byte_server, tmp_path)
    ((name, (answer_id, same)),) = printed.items()
    assert (name, same) == ("instructor", "True")
    (log,) = Logs(byte_server.logs).of(answer_id, 1, 10)
    assert log["usage"]["accepted"] > 0


@pytest.fixture(scope="module")
def javascript(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs beside the installed packages."""
    installed = os.environ.get("GPU_ALIGN_CLIENTS_JS")
    if installed is None or shutil.which("node") is None:
        pytest.skip("the JavaScript clients are not installed: make clients")
    directory = tmp_path_factory.mktemp("javascript")
    for program in (CLIENTS / "javascript").iterdir():
        shutil.copy(program, directory)
    (directory / "node_modules").symlink_to(Path(installed).resolve() / "node_modules")
    return directory


def test_openai_npm(javascript: Path, server: Server) -> None:
    printed = run(["node", "with_openai.mjs"], server, javascript)
    assert printed.pop("openai-error") == ["400", "prediction"]
    check(printed, ["openai", "openai-stream"], server)


def test_ai_sdk(javascript: Path, server: Server) -> None:
    check(run(["node", "with_ai_sdk.mjs"], server, javascript), ["ai-sdk", "ai-sdk-stream"], server)
