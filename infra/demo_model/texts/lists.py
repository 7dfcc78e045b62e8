"""Two short ways to write long lists of words and of phrases.

What it is not: the lists themselves.  It is called by the modules that hold them.
"""

from __future__ import annotations


def split_words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


def piped(text: str) -> tuple[str, ...]:
    """The phrases of a text in which ``|`` stands between them."""
    return tuple(part.strip() for part in " ".join(text.split()).split("|"))
