"""``python -m benchmarks.published``."""

from benchmarks.published.main import main

raise SystemExit(main())
