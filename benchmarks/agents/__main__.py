"""``python -m benchmarks.agents``."""

from benchmarks.agents.main import main

raise SystemExit(main())
