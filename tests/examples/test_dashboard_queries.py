"""Every query of the dashboard, run by a real Prometheus over our metrics at known values."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_metrics import exposed, prometheus

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
sys.path.append(str(DEPLOY))
import check_dashboard as check  # noqa: E402

WINDOW = "6s"
#: What follows from `example_metrics.STEPS`, whatever the speed at which they are counted.
EXACT = {
    "Accepted of verified prediction tokens": 30 / 40,
    "Draft tokens accepted per verification step": 32 / 4,
    "Steps lost": 2 / 7,
}

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus that has scraped for as long as the queries look back."""
    with exposed() as target, prometheus(target, tmp_path_factory.mktemp("prometheus")) as url:
        deadline = time.monotonic() + 60
        counted = "count_over_time(gpu_align_requests_total[1m])"
        while time.monotonic() < deadline:
            found = check.ask(url, "query", query=counted)["result"]
            if found and int(found[0]["value"][1]) > 6:
                break
            time.sleep(0.3)
        yield url


def test_every_query_has_the_data_that_was_counted(scraped: str) -> None:
    dashboard = json.loads(check.DASHBOARD.read_text(encoding="utf-8"))
    queries = list(check.queries(dashboard, WINDOW))
    assert len(queries) > len(dashboard["panels"])
    last = {}
    for query in queries:
        found = check.ask(scraped, "query", query=query.expr)["result"]
        values = [float(one["value"][1]) for one in found]
        assert values, query.expr
        assert all(value == value for value in values), query.expr  # no NaN
        assert any(values), query.expr
        labels = set(query.legend.replace("{{", "\0").split("\0")[1:])
        for name in (label.split("}}")[0] for label in labels):
            assert all(name in one["metric"] for one in found), query.expr
        last[query.panel["title"]] = values
    for title, expected in EXACT.items():
        assert last[title] == [pytest.approx(expected, rel=0.1)], title


def test_the_job_variable_finds_the_job(scraped: str) -> None:
    dashboard = json.loads(check.DASHBOARD.read_text(encoding="utf-8"))
    [job] = [v for v in dashboard["templating"]["list"] if v["name"] == "job"]
    name, label = job["query"]["query"].removeprefix("label_values(").rstrip(")").split(", ")
    found = check.ask(scraped, "query", query=name)["result"]
    assert {one["metric"][label] for one in found} == {"vllm"}


def test_the_command_says_which_query_has_no_data(
    scraped: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ["check_dashboard.py", scraped, "--window", WINDOW, "--minutes", "1"]
    png = tmp_path / "dashboard.png"
    monkeypatch.setattr(sys, "argv", [*given, "--png", str(png)])
    assert check.main() == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("queries have data, 0 have not")
    assert png.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(sys, "argv", [*given, "--job", "other"])
    assert check.main() == 1
    assert "no data  Steps lost" in capsys.readouterr().out


def test_what_prometheus_refuses_is_said_in_its_words(scraped: str) -> None:
    with pytest.raises(ValueError, match="parse error"):
        check.ask(scraped, "query", query="sum(")
