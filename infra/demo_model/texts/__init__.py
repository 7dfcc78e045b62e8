"""Texts, facts and words for tasks and training text."""
