"""``python -m benchmarks.quality``."""

from benchmarks.quality.main import main

raise SystemExit(main())
