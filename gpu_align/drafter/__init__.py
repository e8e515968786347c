"""`Drafter`, what it keeps, and what is known of its steps: settings, arena, memory, step log, explanations."""
