"""Which packages the corpus is made of. Nothing of a package is in both splits."""

from __future__ import annotations

from benchmarks.corpus.files import PackagePair, Source

#: The packages whose ``.py`` files the published table of draft quality is about.
FIVE = (
    PackagePair("requests", "2.28.2", "2.32.3"),
    PackagePair("flask", "2.2.5", "3.0.3"),
    PackagePair("rich", "13.3.5", "13.9.4"),
    PackagePair("werkzeug", "2.2.3", "3.0.6"),
    PackagePair("jinja2", "3.0.3", "3.1.6"),
)
_DOCUMENTS = ("document", "config", "json")


def _wheel(text: str, *sorts: str, most: int = 25) -> Source:
    return Source(PackagePair.parse(text), sorts or ("python", "document"), most=most)


def _sdist(text: str, *sorts: str, most: int = 20) -> Source:
    return Source(PackagePair.parse(text), sorts or _DOCUMENTS, sdist=True, most=most)


_TUNE = (
    _wheel("click:8.0.4:8.1.7"),
    _wheel("attrs:22.1.0:23.2.0"),
    _wheel("urllib3:1.26.15:2.2.1"),
    _wheel("packaging:21.3:24.0"),
    _wheel("httpx:0.23.3:0.27.0"),
    _wheel("starlette:0.27.0:0.37.2"),
    _wheel("pydantic:2.0:2.7.0"),
    _wheel("tqdm:4.62.0:4.66.4"),
    # Neighbouring releases: few lines change.
    _wheel("fastapi:0.109.0:0.110.0"),
    _wheel("trio:0.24.0:0.25.0"),
    _wheel("sqlfluff:2.3.0:3.0.0", most=20),
    _wheel("textual:0.47.0:0.60.0", most=20),
    _wheel("ansible-core:2.15.0:2.17.0", "python", "config", most=20),
    _wheel("check-jsonschema:0.26.3:0.29.0", "json"),
    _wheel("dbt-adapters:1.1.0:1.10.0", "sql"),
    _sdist("click:8.0.4:8.1.7"),
    _sdist("structlog:22.3.0:24.1.0"),
    _sdist("celery:5.2.7:5.4.0"),
)
_TEST = (
    *(Source(package) for package in FIVE),
    _wheel("anyio:3.7.1:4.4.0", most=10),
    _wheel("marshmallow:3.19.0:3.21.3", most=10),
    _wheel("typer:0.9.0:0.12.3", most=10),
    _wheel("django:4.2:5.0", "python", most=10),
    _wheel("jupyterlab:4.0.0:4.2.0", "json"),
    _sdist("flask:2.2.5:3.0.3", most=12),
    _sdist("werkzeug:2.2.3:3.0.6", most=12),
    _sdist("jinja2:3.0.3:3.1.6", most=12),
    _sdist("pytest:7.2.2:8.2.0", "python", *_DOCUMENTS, most=12),
    _sdist("tox:4.4.0:4.15.0"),
    _sdist("sqlglot:20.0.0:25.0.0", "sql"),
)

#: Name on the command line -> ``(split, source)``.
SETS: dict[str, list[tuple[str, Source]]] = {
    "five": [("test", Source(package)) for package in FIVE],
    "tune": [("tune", source) for source in _TUNE],
    "test": [("test", source) for source in _TEST],
}
SETS["all"] = SETS["tune"] + SETS["test"]
