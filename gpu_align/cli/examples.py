"""Examples of each command, shown by ``--help`` and in ``docs/cli.md``; a test runs them."""

from __future__ import annotations

#: Command → its examples: what it is good for, and the line.
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "simulate": (
        ("Every drafter on a file of records", "gpu-align simulate pairs.jsonl"),
        (
            "Two drafters, the figures as JSON",
            "gpu-align simulate pairs.jsonl --policy gpu_align --policy prompt_lookup -k 32 --json out.json",
        ),
        (
            "One edit: what the old file saves of the new one",
            "gpu-align simulate --before old.py --after new.py --policy gpu_align --html page.html",
        ),
        (
            "The edits of the last commits of a repository",
            "gpu-align simulate --git HEAD~2..HEAD --repo project --suffix .py --policy gpu_align",
        ),
    ),
    "policies": (
        ("All drafters", "gpu-align policies"),
        ("Options and source of one", "gpu-align policies openai"),
    ),
    "recipes learn": (
        ("From two projects", "gpu-align recipes learn own.json.gz projects/one projects/two --suffix .py"),
    ),
    "recipes observe": (
        (
            "From samples of a model",
            "gpu-align recipes observe samples.jsonl --tokenizer tekken --out observed.json.gz",
        ),
    ),
    "recipes merge": (("Two packs", "gpu-align recipes merge one.json.gz two.json.gz --out both.json.gz"),),
    "recipes report": (
        (
            "What a pack is worth on a model's outputs",
            "gpu-align recipes report base outputs.jsonl --tokenizer tekken --json worth.json",
        ),
    ),
    "recipes show": (("The most frequent entries", "gpu-align recipes show base --top 5"),),
    "recipes index": (("A folder for a server", "gpu-align recipes index packs"),),
    "tune": (
        ("From requests with their predictions", "gpu-align tune traffic.jsonl --out table.json"),
        (
            "With a recipe pack, which holds words of them",
            "gpu-align tune traffic.jsonl --out table.json --pack own.json.gz --tokenizer tekken",
        ),
    ),
    "demo": (("A tiny model, made here", "gpu-align demo --out demo_out"),),
    "report": (
        ("One request", "gpu-align report logs/chatcmpl-1.yaml --html page.html"),
        ("All requests of a folder", "gpu-align report logs --top 3 --json requests.json"),
    ),
    "doctor": (
        ("The verdict", "gpu-align doctor"),
        ("Everything, for a bug report", "gpu-align doctor -v"),
        ("For a script", "gpu-align doctor --json"),
    ),
}


def epilog(command: str) -> str:
    """The examples of a command for ``@app.command(..., epilog=...)``."""
    return "\n\n".join(["Examples:", *(f"  {line}" for _, line in EXAMPLES[command])])
