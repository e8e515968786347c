"""How good drafters are on known outputs: ``gpu-align simulate``; `replay` has the names that are public."""
