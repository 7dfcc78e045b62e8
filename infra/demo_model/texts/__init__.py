"""The texts, facts and words from which tasks and training text are made."""
