"""`make demo`: `bench` on a model that it trains. Importing this package imports neither torch nor vLLM."""
