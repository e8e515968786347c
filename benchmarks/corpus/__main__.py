"""``python -m benchmarks.corpus``."""

from benchmarks.corpus.build import main

main()
