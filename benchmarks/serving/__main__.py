"""``python -m benchmarks.serving``."""

import typer

from benchmarks.serving.main import main

typer.run(main)
