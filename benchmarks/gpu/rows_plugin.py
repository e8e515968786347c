"""A pytest plugin that writes results as they come: ``pytest -p benchmarks.gpu.rows_plugin``.

``GPU_CHECK_FILE`` names the result file, ``GPU_CHECK_STAGE`` the stage, ``GPU_CHECK_DRY_RUN=1`` a dry run. A
file of tests is a row with counts, written again after each of its tests; what fails is a row of its own, and
so is a file that cannot be imported. In the stage ``suite``, which is the default, a benchmark is a row with its
times.

With pytest-xdist only the process that hands out the tests writes.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import result_file
from benchmarks.gpu.result_file import FAILED, MEASURED, PASSED, SKIPPED, STARTED, ResultFile

#: Seconds between two writes of a row whose tests pass.
EVERY = 0.5


def pytest_configure(config: pytest.Config) -> None:
    if "GPU_CHECK_FILE" in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Rows(), "gpu-check-rows")


class Rows:
    """The rows of one run."""

    def __init__(self) -> None:
        path, stage = Path(os.environ["GPU_CHECK_FILE"]), os.environ.get("GPU_CHECK_STAGE", "suite")
        self.is_suite, self.is_dry_run = stage == "suite", os.environ.get("GPU_CHECK_DRY_RUN") == "1"
        self.file = ResultFile(path, stage, result_file.machine_header(), self.is_dry_run)
        self.counts: dict[str, dict[str, Any]] = defaultdict(
            lambda: {"collected": 0, "passed": 0, "failed": 0, "skipped": 0, "test_seconds": 0.0}
        )
        self.skips: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.written = 0.0

    # What there is to run.

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Benchmarks: those of a GPU first, then small before large; in a dry run one of each function."""
        if not self.is_suite:
            return

        def key(item: pytest.Item) -> tuple[bool, int]:
            params = getattr(getattr(item, "callspec", None), "params", {})
            on_gpu = "gpu" in item.name or "triton" in item.name
            return not on_gpu, params.get("batch", 1) * params.get("size", 1)

        items.sort(key=key)
        if self.is_dry_run:
            first: dict[str, pytest.Item] = {}
            for item in items:
                first.setdefault(f"{item.nodeid.partition('[')[0]}", item)
            items[:] = first.values()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected([item.nodeid for item in getattr(session, "items", [])])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._collected(ids)

    def _collected(self, ids: list[str]) -> None:
        for counts in self.counts.values():
            counts["collected"] = 0
        for test_id in ids:
            self.counts[test_id.partition("::")[0]]["collected"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.passed:
            return
        text = str(report.longrepr)
        missing = re.search(r"No module named '([\w.]+)'|could not import '([\w.]+)'", text)
        if missing:
            self.file.row(report.nodeid, SKIPPED, reason=f"not installed: {missing[1] or missing[2]}")
        elif report.skipped:
            self.file.row(report.nodeid, SKIPPED, reason=_reason(report))
        else:
            self.file.row(report.nodeid, FAILED, reason=text[-2000:])

    # What was run.

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = report.nodeid.partition("::")[0]
        counts = self.counts[path]
        counts["test_seconds"] += report.duration
        if report.failed:
            counts["failed"] += 1
            self.file.row(report.nodeid, FAILED, reason=str(report.longrepr)[-2000:])
        elif report.skipped:
            counts["skipped"] += 1
            self.skips[path][_reason(report)] += 1
            if self.is_suite:
                self.file.row(report.nodeid, SKIPPED, reason=_reason(report))
        elif report.when == "call":
            counts["passed"] += 1
        if not self.is_suite and (report.failed or time.monotonic() - self.written > EVERY):
            self._write_counts()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Any:
        fixture = getattr(item, "funcargs", {}).get("benchmark")
        stats = getattr(fixture, "stats", None)
        if self.is_suite and stats is not None and not getattr(stats, "has_error", False):
            params = getattr(getattr(item, "callspec", None), "params", {})
            contestant = params.get("name") or item.name.partition("[")[0].removeprefix("test_")
            times = {f"{name}us": round(getattr(stats.stats, number) * 1e6, 2)
                     for name, number in (("", "median"), ("iqr_", "iqr"))}  # fmt: skip
            more = {"group": fixture.group or "", "contestant": contestant, "rounds": stats.stats.rounds}
            self.file.row(item.nodeid, MEASURED, **times, **more, **fixture.extra_info)
        yield

    def _write_counts(self) -> None:
        for path, counts in self.counts.items():
            done = counts["passed"] + counts["failed"] + counts["skipped"]
            verdict = FAILED if counts["failed"] else PASSED
            if done < counts["collected"]:
                verdict = STARTED
            elif not counts["failed"] and not counts["passed"]:
                verdict = SKIPPED
            rounded = {**counts, "test_seconds": round(counts["test_seconds"], 2)}
            reason = "; ".join(f"{number} × {why}" for why, number in self.skips[path].items())
            self.file.row(path, verdict, **rounded, **({"reason": reason} if reason else {}))
        self.written = time.monotonic()

    def pytest_sessionfinish(self) -> None:
        if not self.is_suite:
            self._write_counts()


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why it was skipped."""
    found = report.longrepr
    text = found[2] if isinstance(found, tuple) else str(found)
    return str(text).removeprefix("Skipped: ")
