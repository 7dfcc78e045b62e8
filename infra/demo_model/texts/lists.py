"""Two helpers to write long lists of words and phrases.

Called by the modules that contain such lists.
"""

from __future__ import annotations


def split_words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


def piped(text: str) -> tuple[str, ...]:
    """The phrases of a text, separated by ``|``."""
    return tuple(part.strip() for part in " ".join(text.split()).split("|"))
