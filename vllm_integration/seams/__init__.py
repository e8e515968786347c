"""Every private vLLM name, in one table, and the one installer that wraps them. Imports nothing of the package."""
