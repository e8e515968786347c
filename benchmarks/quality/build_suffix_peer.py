"""Build Arctic's suffix decoding for comparison: ``python -m benchmarks.quality.build_suffix_peer``.

The published wheel of arctic-inference comes with an engine. What is compared with is its suffix tree alone, two
C++ files. So this takes the sdist from PyPI, compiles them against nanobind, and leaves an importable
``arctic_inference.suffix_decoding`` in ``.cache/suffix_peer``: the package's own Python beside the compiled
tree, unchanged. Nothing of it is kept in this repository, and nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.corpus.files import download

VERSION = "0.3.0"
NANOBIND = "2.9.2"
FOLDER = Path(".cache/suffix_peer")
#: Names the versions that a finished build was made from; written last.
STAMP = "BUILT"


def add_to_path() -> bool:
    """Let this process import what `build` left; False if there is nothing."""
    if not (FOLDER / STAMP).is_file():
        return False
    if str(FOLDER.resolve()) not in sys.path:
        sys.path.append(str(FOLDER.resolve()))
    return True


def make_ready() -> None:
    """`build` where that was not done, and `add_to_path`. SystemExit: it cannot be built."""
    # An extension belongs to one Python: another one builds again.
    stamp = f"arctic-inference {VERSION}, nanobind {NANOBIND}, {sys.implementation.cache_tag}\n"
    if not (FOLDER / STAMP).is_file() or (FOLDER / STAMP).read_text() != stamp:
        build()
        (FOLDER / STAMP).write_text(stamp)
    add_to_path()


def build() -> None:
    """Download and compile into `FOLDER`."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise SystemExit("error: no C++ compiler: install g++ or clang++, or name one in CXX")
    shutil.rmtree(FOLDER, ignore_errors=True)
    work = FOLDER / "src"
    work.mkdir(parents=True)
    sdist = download("arctic-inference", VERSION, sdist=True, cache=work)
    shutil.unpack_archive(download("nanobind", NANOBIND, cache=work), work, "zip")
    shutil.unpack_archive(sdist, work, filter="data")
    source = work / sdist.name.removesuffix(".tar.gz")
    package = FOLDER / "arctic_inference" / "suffix_decoding"
    package.mkdir(parents=True)
    # No __init__.py beside it: the real one imports the engine plugin, and a namespace package needs none.
    for name in ("__init__.py", "cache.py"):
        shutil.copy(source / "arctic_inference" / "suffix_decoding" / name, package / name)
    nanobind, tree = work / "nanobind", source / "csrc" / "suffix_decoding"
    done = subprocess.run(
        [compiler, "-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden",
         "-fno-strict-aliasing", *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []),
         f"-I{sysconfig.get_paths()['include']}", f"-I{nanobind / 'include'}",
         f"-I{nanobind / 'ext/robin_map/include'}",
         *map(str, (tree / "bindings.cc", tree / "suffix_tree.cc", nanobind / "src/nb_combined.cpp")),
         "-o", str(package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit("\n".join([f"error: {compiler} failed:", *done.stderr.strip().splitlines()[-5:]]))


if __name__ == "__main__":
    make_ready()
    print(f"suffix decoding of arctic-inference {VERSION} is in {FOLDER}")
