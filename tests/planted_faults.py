"""Plants faults and reports which tests go red: ``python -m tests.planted_faults``.

The same seed plants the same faults, evenly over three parts (core, tools, plugin) and seven kinds, at most one in
a function. Each is planted in a copy of the tree, where the tests that reach its statement run, the shortest
first, until one is red. Faults are drawn by a hash of their function's name and their text: what an older checkout
has, too, is planted there as well, wherever it stands.

Which tests reach a fault is found first: a copy with a marker before every chosen statement runs all tests that
start no engine. A fault that makes its tests exceed their time counts as found, and the table says so.

mutmut and cosmic-ray do not serve: mutmut 3 renames functions behind a dispatcher, which breaks whatever reads
sources (Triton, Numba), and cosmic-ray starts the test command anew for each fault.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("gpu_align", "vllm_integration")
PARTS = ("core", "tools", "plugin")
TOOLS = re.compile(r"gpu_align/(tools|policies|simulate)\b")
TURNED, MOVED, LEFT_OUT, DEFAULT, SWAPPED, RETURN, NEGATED = KINDS = (
    "comparison turned", "bound moved by one", "call left out", "wrong default", "operator swapped",
    "return value changed", "condition negated",
)  # fmt: skip
#: Kind → operator → the wrong one.
OPERATORS: dict[str, dict[type[ast.AST], type[Any]]] = {
    TURNED: {
        ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
        ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    },
    MOVED: {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    SWAPPED: {
        ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
        ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
        ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    },
}  # fmt: skip
#: Where no test should look: log and error texts, and what does nothing under Triton's interpreter.
SILENT = re.compile(
    r"(_?log(ger)?|LOG(GER)?|warnings)\.|(print|debug_barrier|static_assert|device_assert|super\(\).__init__)$"
)
UNSEEN = (ast.JoinedStr, ast.Raise, ast.Assert, ast.While, ast.Import, ast.ImportFrom)
#: Not mapped: tests of programs that nobody installs, and folders of which every test starts an engine.
IGNORED = ("tests/benchmarks/", "tests/campaign/", "tests/vllm/")
#: Seconds of tests that a fault gets, by the times of the map, but at least three tests; and how much longer than
#: in the map they may take on a busy machine.
BUDGET_S, PATIENCE, START_S = 30.0, 6.0, 60.0
MARKER = """import os
seen = set()
def hit(fault):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (fault, test) not in seen:
        seen.add((fault, test))
        with open({path!r}, "a") as file:
            file.write(f"{{fault}}\\t{{test}}\\n")
"""


@dataclass
class Fault:
    part: str
    file: str
    line: int
    function: str
    kind: str
    old: str
    new: str
    start: int  # of the bytes that `new` replaces
    end: int
    marked: int  # the line that a marker goes before; 0: in no function
    key: str = ""


def wrong_forms(node: ast.AST, returns: str) -> Iterator[tuple[str, Any, str, str]]:
    """The faults of one node: kind, the node to replace, by what, its name. `returns`: the function's type."""
    match node:
        case ast.Compare(left, [op], right):
            for kind in (TURNED, MOVED):
                if wrong := OPERATORS[kind].get(type(op)):
                    yield kind, node, f"({ast.unparse(ast.Compare(left, [wrong()], right))})", ""
        case ast.BinOp(left, op, right) if type(op) in OPERATORS[SWAPPED]:
            inner = list(ast.walk(node))
            texts = (isinstance(getattr(part, "value", 0), str) for part in inner)
            if not any(texts) and not any(isinstance(p, (ast.JoinedStr, ast.List, ast.Tuple)) for p in inner):
                wrong = OPERATORS[SWAPPED][type(op)]()
                yield SWAPPED, node, f"({ast.unparse(ast.BinOp(left, wrong, right))})", ""
        case ast.Slice():
            for bound in filter(None, (node.lower, node.upper)):
                yield MOVED, bound, f"({ast.unparse(bound)}) + 1", ""
        case ast.Call(ast.Name("range"), [bound] | [_, bound, *_]) if not isinstance(bound, ast.Starred):
            yield MOVED, bound, f"({ast.unparse(bound)}) + 1", ""
        case ast.Expr(ast.Call()):
            yield LEFT_OUT, node, "pass", ""
        case ast.If(test) | ast.IfExp(test):
            yield NEGATED, test, f"not ({ast.unparse(test)})", ""
        case ast.Return(ast.expr() as value) if getattr(value, "value", 0) is not None:
            wrong = f"({ast.unparse(value)}) + 1" if returns in ("int", "float", "") else "None"
            yield RETURN, value, f"not ({ast.unparse(value)})" if returns == "bool" else wrong, ""
        case ast.FunctionDef(args=args) | ast.AsyncFunctionDef(args=args):
            named = [*args.posonlyargs, *args.args][-len(args.defaults) :] if args.defaults else []
            names = [argument.arg for argument in (*named, *args.kwonlyargs)]
            yield from wrong_defaults(zip(names, (*args.defaults, *args.kw_defaults), strict=True))
        case ast.ClassDef(body=body):
            fields = (field for field in body if isinstance(field, ast.AnnAssign))
            yield from wrong_defaults((ast.unparse(field.target), field.value) for field in fields)


def wrong_defaults(values: Any) -> Iterator[tuple[str, Any, str, str]]:
    for name, node in values:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            wrong = not node.value if isinstance(node.value, bool) else node.value * 2 + 1
            yield DEFAULT, node, repr(wrong), f"{name} = "


def faults_of(file: str, source: bytes) -> list[Fault]:
    """All faults of a file, but for annotations, decorators, texts, loops that would not end, and `__repr__`."""
    part = PARTS[2] if file.startswith(PACKAGES[1]) else PARTS[bool(TOOLS.match(file))]
    starts = [0, *(match.end() for match in re.finditer(b"\n", source))]
    found: list[Fault] = []

    def walk(node: ast.AST, function: str, returns: str, marked: int, keep: bool = False) -> None:
        if isinstance(node, UNSEEN):
            return
        called = node.value if isinstance(node, ast.Expr) else node
        if isinstance(called, ast.Call) and SILENT.search(ast.unparse(called.func)):
            return
        if isinstance(node, ast.If) and re.search("TYPE_CHECKING|__name__", ast.unparse(node.test)):
            return
        if isinstance(node, ast.stmt) and marked and not keep:
            marked = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
        inner, children = marked, list(ast.iter_child_nodes(node))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            children = [*node.body[ast.get_docstring(node) is not None :]]
            if node.name in ("__repr__", "__str__") or not children or node.body[0].lineno == node.lineno:
                return
            function, returns = f"{function}.{node.name}", ast.unparse(node.returns) if node.returns else ""
            inner = children[0].lineno
        elif isinstance(node, ast.ClassDef):
            function, returns, inner, children = f"{function}.<{node.name}>", "", 0, [*node.body]
        elif isinstance(node, ast.AnnAssign):
            children = [node.value] if node.value else []
        for kind, wrong, new, name in wrong_forms(node, returns):
            start = starts[wrong.lineno - 1] + wrong.col_offset
            end = starts[wrong.end_lineno - 1] + wrong.end_col_offset
            place = part, file, wrong.lineno, function.strip("."), kind
            found.append(Fault(*place, name + ast.unparse(wrong), new, start, end, inner))
        for child in children:
            # No marker fits before an `elif`.
            is_elif = isinstance(node, ast.If) and child in node.orelse and isinstance(child, ast.If)
            walk(child, function, returns, inner, is_elif and child.col_offset == node.col_offset)

    walk(ast.parse(source), "", "", 0)
    return found


def choose(tree: Path, seed: int, count: int) -> list[Fault]:
    """`count` faults, a third of them in each part, taken in turn from the kinds, at most one of a function."""
    every, times = [], Counter[str]()
    for path in sorted(path for package in PACKAGES for path in (tree / package).rglob("*.py")):
        for fault in faults_of(path.relative_to(tree).as_posix(), path.read_bytes()):
            name = f"{seed}|{fault.function.rpartition('.')[2].strip('_<>')}|{fault.kind}|{fault.old}"
            times[name] += 1
            digest = hashlib.sha256(f"{name}|{times[name]}".encode()).hexdigest()
            every.append(replace(fault, key=digest[:12]))
    every.sort(key=lambda fault: fault.key)
    chosen: list[Fault] = []
    for part in PARTS:
        of_kinds = [[fault for fault in every if (fault.part, fault.kind) == (part, kind)] for kind in KINDS]
        taken = set[tuple[str, str]]()
        for i in range(count // len(PARTS)):
            fault = next(f for f in of_kinds[i % len(KINDS)] if (f.file, f.function) not in taken)
            taken.add((fault.file, fault.function))
            chosen.append(fault)
    return chosen


@contextlib.contextmanager
def changed(copy: Path, edits: dict[str, bytes]) -> Iterator[None]:
    """Files of the copy with other contents, for a while."""
    before = {file: (copy / file).read_bytes() for file in edits}
    for contents in (edits, before):
        for file, content in contents.items():
            (copy / file).write_bytes(content)
        if contents is edits:
            yield


class Recorder:
    """Writes a line for each test: its id, how it ended, its seconds."""

    def __init__(self, path: Path) -> None:
        self.path, self.seconds = path, 0.0

    def write(self, test: str, outcome: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{test}\t{outcome}\t{self.seconds:.3f}\n")
        self.seconds = 0.0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds += report.duration
        if report.failed or report.skipped or report.when == "teardown":
            self.write(report.nodeid, report.outcome)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.write(report.nodeid or "collection", "failed")


def run_tests(copy: Path, arguments: list[str], limit: float) -> tuple[str, list[list[str]]]:
    """In a fork of this process, which has imported all but the tree: how it ended, and a line for each test."""
    lines = copy.parent / "tests.tsv"
    lines.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        os.setsid()
        output = os.open(copy.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", *PACKAGES)]:
            del sys.modules[name]
        code = 3
        try:
            from hypothesis import Phase, settings

            settings.register_profile("faults", phases=[Phase.explicit, Phase.generate], database=None)
            settings.load_profile("faults")
            options = ["-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
            code = pytest.main([*options, *arguments], plugins=[Recorder(lines)])
        finally:
            os._exit(code)
    deadline, ended, status = time.monotonic() + limit, 0, 0
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):  # and whatever its tests have left running
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    how = f"exit {os.waitstatus_to_exitcode(status)}" if ended else "time-out"
    return how, [line.split("\t") for line in lines.read_text().splitlines()] if lines.exists() else []


def map_tests(copy: Path, faults: list[Fault], tests: list[str]) -> dict[str, dict[str, float]]:
    """For each fault the green tests that reach it, with seconds; for a field, those that name class or file."""
    hits, edits = copy.parent / "hits.tsv", dict[str, bytes]()
    hits.write_text("")
    (copy / "planted_hits.py").write_text(MARKER.format(path=str(hits)))
    for file in {fault.file for fault in faults}:
        text = (copy / file).read_text().splitlines(keepends=True)
        here = [fault for fault in faults if fault.file == file and fault.marked]
        for fault in sorted(here, key=lambda fault: -fault.marked):
            at = fault.marked - 1
            indent = text[at][: len(text[at]) - len(text[at].lstrip())]
            text.insert(at, f'{indent}__import__("planted_hits").hit("{fault.key}")\n')
        edits[file] = "".join(text).encode()
    with changed(copy, edits):
        _, lines = run_tests(copy, [*tests, "-m", "not vllm and not gpu"], limit=7200.0)
    red = {test for test, outcome, _ in lines if outcome == "failed"}
    seconds = {test: float(took) for test, outcome, took in lines if outcome == "passed" and test not in red}
    reached: dict[str, dict[str, float]] = {fault.key: {} for fault in faults}
    for key, test in (line.split("\t") for line in hits.read_text().splitlines()):
        if test in seconds:
            reached[key][test] = seconds[test]
    texts = {file: (copy / file).read_text() for file in {test.partition("::")[0] for test in seconds}}
    for fault in (fault for fault in faults if not fault.marked):
        for word in (*re.findall(r"<(\w+)>", fault.function)[::-1], Path(fault.file).stem):
            naming = {test: seconds[test] for test in seconds if word in texts[test.partition("::")[0]]}
            reached[fault.key] = reached[fault.key] or naming
    return reached


def shortest(reached: dict[str, float]) -> tuple[list[str], float]:
    """The tests that a fault gets, and their seconds."""
    tests, total = list[str](), 0.0
    for test, took in sorted(reached.items(), key=lambda item: item[1]):
        if len(tests) < 3 or total + took <= BUDGET_S:
            tests.append(test)
            total += took
    return tests, total


def try_fault(copy: Path, fault: Fault, tests: list[str], seconds: float) -> dict[str, Any]:
    """Plant one fault; its row of the table. A test has found it if it is red on its own, too."""
    limit, ended, red = START_S + PATIENCE * seconds, "exit 0", list[str]()
    source = (copy / fault.file).read_bytes()
    content = source[: fault.start] + fault.new.encode() + source[fault.end :]
    with changed(copy, {fault.file: content}):
        while tests:
            ended, lines = run_tests(copy, ["-x", *tests], limit)
            red = [test for test, outcome, _ in lines if outcome == "failed"]
            if not red or len(tests) == 1 or run_tests(copy, red[:1], limit)[0] != "exit 0":
                break
            tests, ended = [test for test in tests if test not in red], "exit 0"
    found = "" if ended == "exit 0" else ended if ended == "time-out" else (red or [ended])[0]
    print(f"{fault.file}:{fault.line}  {fault.kind}  {found or 'NOT FOUND'}", flush=True)
    return {**asdict(fault), "found_by": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=126)
    parser.add_argument("--seed", type=int, default=26)
    parser.add_argument(
        "--json", type=Path, help="where all rows go; a fault with a row there is not tried again"
    )
    options = parser.parse_args()
    os.environ.update(TRITON_INTERPRET="1", NUMBA_DISABLE_JIT="1", GPU_ALIGN_RECIPES="off")
    for name in ("torch", "triton.language", "numba", "vllm.config", "transformers", "httpx", "rich"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    kept = options.json and options.json.exists()
    rows = {row["key"]: row for row in json.loads(options.json.read_text())} if kept else {}
    left = [fault for fault in choose(ROOT, options.seed, options.count) if fault.key not in rows]
    files = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    files = [file for file in files if not file.startswith(IGNORED)]
    with tempfile.TemporaryDirectory() as made:
        copy, leave = Path(made) / "tree", (".git", ".venv*", ".cache", "__pycache__", "site")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*leave))
        reached = map_tests(copy, left, files) if left else {}
        for fault in left:
            rows[fault.key] = try_fault(copy, fault, *shortest(reached[fault.key]))
            if options.json:
                options.json.write_text(json.dumps([*rows.values()], indent=1))
    print("\n| part | file | line | fault | found by |\n|---|---|---|---|---|")
    for row in sorted(rows.values(), key=lambda row: (PARTS.index(row["part"]), row["file"], row["line"])):
        what = f"{row['kind']}: `{row['old']}` → `{row['new']}`".replace("|", "\\|").replace("\n", " ")
        cells = row["part"], row["file"], str(row["line"]), what, row["found_by"] or "**none**"
        print(f"| {' | '.join(cells)} |")
    for part in PARTS:
        found = [row["found_by"] for row in rows.values() if row["part"] == part]
        share = f"{sum(map(bool, found))} of {len(found)} found"
        print(f"{part:<8}{share}, {found.count('time-out')} of them by time-out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
