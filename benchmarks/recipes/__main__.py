"""``python -m benchmarks.recipes``."""

from benchmarks.recipes.main import main

raise SystemExit(main())
