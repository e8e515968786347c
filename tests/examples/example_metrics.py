"""Our metrics at known values, on a port, and a Prometheus that scrapes them."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from threading import Event, Thread

import numpy as np
import prometheus_client

from vllm_integration.frontend import metrics
from vllm_integration.wire.steps import Steps

#: source, proposed, verified, accepted of the steps that are counted each time. The last are one with no draft,
#: one without slots, and the first of a request. 30 of 40 prediction tokens are accepted; 2 of 7 steps are lost.
STEPS = [
    (1, 8, 8, 8),
    (1, 16, 16, 16),
    (1, 16, 16, 6),
    (2, 4, 4, 2),
    (0, 0, 0, 0),
    (1, 8, 0, 0),
    (0, 0, 0, 0),
]


def count_once() -> None:
    """What two requests leave behind, one with a prediction that is refused."""
    metrics.count_request(1000)
    metrics.count_request(None)
    metrics.count_refused("malformed", "refused")
    metrics.count_steps(Steps(*np.array(STEPS).T), firsts=1, realignments=1)
    metrics.count_finished(30, 10)


@contextmanager
def exposed() -> Iterator[str]:
    """The address of a `/metrics`, where `count_once` happens ten times a second."""
    metrics.set_info(version="0", vllm="0", runner="V2", num_draft_tokens="16", recipes="base")
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1")
    stop = Event()

    def count() -> None:
        while not stop.wait(0.1):
            count_once()

    counter = Thread(target=count, daemon=True)
    counter.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        stop.set()
        counter.join()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def prometheus(target: str, directory: Path) -> Iterator[str]:
    """The URL of a Prometheus that scrapes the target every second, stopped at the end."""
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "vllm", "static_configs": [{"targets": [target]}]}],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["prometheus", f"--config.file={directory / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={directory / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"]
    log = directory / "prometheus.log"
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    try:
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=2):
                    break
            except OSError:
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)
