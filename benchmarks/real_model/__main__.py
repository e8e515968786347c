"""``python -m benchmarks.real_model``."""

from benchmarks.real_model.main import main

raise SystemExit(main())
