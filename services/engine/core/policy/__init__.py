"""The scheduler's policies: queue order, admission, sharing of a step among prompts, and use of draft tokens."""
