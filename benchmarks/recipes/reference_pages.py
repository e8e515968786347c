"""API reference: one page a function, made from its signature and docstring by one template."""

from __future__ import annotations

import ast
import inspect
import re
from typing import NamedTuple

from benchmarks.recipes.groups import Task, happens, of_packages
from benchmarks.recipes.packages import CODE, Package, Shelf
from benchmarks.recipes.python_code import Function, functions

NAME = "api-reference"
#: Groups; outputs; those of one package.
MOST = 400, 300, 60
#: Characters of a function: all but the longest; and of a page.
SHORTEST, LONGEST = 120, 12_000
MOST_OF_A_PAGE = 3_000

_SPHINX = re.compile(
    r":(param|return|returns|raises|raise)(?: ([^:\n]*))?:\s*((?:.+?))(?=\n\s*:|\n\s*\n|\Z)", re.S
)
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields):\s*\n((?:[ \t]+.*\n?|\n)*)", re.M)
_ITEM = re.compile(r"^( {2,8})(\*{0,2}\w+)(?: ?\([^)]*\))?: (.*(?:\n\1 +.*)*)", re.M)


class Doc(NamedTuple):
    """What a docstring says."""

    summary: str
    parameters: dict[str, str]
    returns: str
    raises: dict[str, str]


def task(shelf: Shelf) -> Task:
    """Groups of pages of one package, and single pages."""

    def ask(package: Package) -> str:
        return f"Write the reference page of a function of {package.name}.\n"

    return of_packages(NAME, CODE, ask, lambda package: pages(shelf, package), MOST)


def pages(shelf: Shelf, package: Package) -> list[str]:
    """A page for each public function with a docstring that describes parameters or what is returned."""
    found: dict[str, None] = {}
    for function in functions(shelf, package, SHORTEST, LONGEST):
        doc = doc_of(ast.get_docstring(function.node) or "")
        documented = doc.summary and (doc.parameters or doc.returns or doc.raises)
        if documented and not function.name.startswith("_"):
            page = page_of(function, doc)
            if len(page) <= MOST_OF_A_PAGE:
                found[page] = None
    return list(found)


def doc_of(text: str) -> Doc:
    """Read a docstring with Google sections or Sphinx fields."""
    summary = _plain(re.split(r"\n\s*\n", text)[0])
    parameters: dict[str, str] = {}
    raises: dict[str, str] = {}
    returns = ""
    for kind, name, says in _SPHINX.findall(text):
        if kind == "param":
            parameters[name.split()[-1] if name else "value"] = _plain(says)
        elif kind.startswith("return"):
            returns = _plain(says)
        else:
            raises[name or "Exception"] = _plain(says)
    for section, body in _SECTION.findall(text):
        items = {name: _plain(says) for _, name, says in _ITEM.findall(body)}
        if section in ("Args", "Arguments", "Parameters"):
            parameters.update(items)
        elif section == "Raises":
            raises.update(items)
        else:
            returns = _plain(inspect.cleandoc(body).split(": ", 1)[-1])
    return Doc(summary, parameters, returns, raises)


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def page_of(function: Function, doc: Doc) -> str:
    """The page."""
    node = function.node
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    defaults = dict(_defaults(node.args))
    signature = ast.unparse(node.args)
    result = ast.unparse(node.returns) if node.returns else "None"
    kind = "method" if function.owner else "function"
    title = f"{function.owner}.{node.name}" if function.owner else node.name
    lines = [
        f"# `{title}`",
        "",
        f"*{kind.capitalize()} of `{function.module}`*",
        "",
        "```python",
        f"def {node.name}({signature}) -> {result}",
        "```",
        "",
        doc.summary,
        "",
        "## Parameters",
        "",
        "| name | type | default | description |",
        "|---|---|---|---|",
    ]
    for argument in arguments:
        if argument.arg not in ("self", "cls"):
            annotation = f"`{ast.unparse(argument.annotation)}`" if argument.annotation else "any"
            default = f"`{defaults[argument.arg]}`" if argument.arg in defaults else "required"
            says = doc.parameters.get(argument.arg, "–")
            lines.append(
                f"| `{argument.arg}` | {annotation.replace('|', chr(92) + '|')} | {default} | {says} |"
            )
    lines += ["", "## Returns", "", f"`{result}`: {doc.returns or 'nothing is documented.'}", ""]
    lines += ["## Raises", ""]
    lines += [f"- `{name}`: {says}" for name, says in doc.raises.items()] or ["No exception is documented."]
    # A page in a hundred lacks the line that all others end with.
    if not happens(0.01, NAME, title):
        lines += ["", "---", "", f"See also: [index of `{function.module.split('.')[0]}`](index.md)"]
    return "\n".join(lines) + "\n"


def _defaults(arguments: ast.arguments) -> list[tuple[str, str]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    found = [
        (argument.arg, ast.unparse(default))
        for argument, default in zip(reversed(positional), reversed(arguments.defaults), strict=False)
    ]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return found + [(argument.arg, ast.unparse(default)) for argument, default in keywords if default]
