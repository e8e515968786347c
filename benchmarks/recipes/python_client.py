"""Python of one form: methods of generated API clients. Samples of a group are one kind of method of several
services.

The clients are those of Google Cloud, all written by one generator. A method sends one request: ``get_instance``
and ``get_queue`` differ in names, types, documentation and arguments; others in how a result is paged or awaited.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks.recipes.groups import NUM_SAMPLES, Group, Output, Task, fives, shuffled
from benchmarks.recipes.packages import CLIENTS, Package, Shelf
from benchmarks.recipes.python_code import Function, functions

NAME = "python-client"
MOST_GROUPS, MOST_OUTPUTS = 240, 60
MOST_OF_A_PACKAGE = 12
#: Characters of a method.
LEAST, MOST = 250, 6_000

_MODULE = re.compile(r"\.services\.\w+\.(async_)?client$")
#: Methods that the generator copies into every client: they are the same text in all packages.
_COPIED = re.compile(r"\b(operations|locations|iam_policy|policy)_pb2\b")


def task(shelf: Shelf) -> Task:
    """Groups of methods of one kind, and single methods of other services."""
    kinds: dict[str, dict[str, None]] = {}
    for package in CLIENTS["train"]:
        for method in methods(shelf, package):
            kinds.setdefault(_ask(method), {})[method.source] = None
    groups = [
        Group(NAME, prompt, samples)
        for prompt, sources in kinds.items()
        for samples in fives(shuffled(sources, NAME))
    ]
    known = {source for sources in kinds.values() for source in sources}
    outputs = []
    for package in CLIENTS["test"]:
        found = {m.source: _ask(m) for m in methods(shelf, package) if m.source not in known}
        found = {s: prompt for s, prompt in found.items() if len(kinds.get(prompt, ())) >= NUM_SAMPLES}
        outputs += [Output(NAME, found[s], s) for s in shuffled(found, NAME)[:MOST_OF_A_PACKAGE]]
    return Task(shuffled(groups, NAME)[:MOST_GROUPS], shuffled(outputs, NAME)[:MOST_OUTPUTS])


def _ask(method: Function) -> str:
    kind = "asynchronous" if method.module.endswith("async_client") else "synchronous"
    return f"Write a method that will {method.name.split('_')[0]} something, of the {kind} client of a service.\n"


def methods(shelf: Shelf, package: Package) -> Iterator[Function]:
    """The methods of a package's clients that send a request, of one version of a service."""
    first = ""
    for method in functions(shelf, package, LEAST, MOST):
        if not _MODULE.search(method.module) or method.name.startswith("_"):
            continue
        version = method.module.split(".services.")[0]
        first = first or version
        sends = any(argument.arg == "request" for argument in method.node.args.args)
        if version == first and sends and not _COPIED.search(method.source):
            yield method
