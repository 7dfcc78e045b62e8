"""Real English sentences: the docstrings of the Python standard library.

The model does not learn to write these. The sentences only widen the vocabulary and are used inside prompts (to be
repeated, or answered with "I do not know"). They come from the running interpreter, licence PSF-2.0 (see the README).
Called by ``tasks_words.py``, ``tasks_unknown.py`` and ``corpus.py``.
"""

from __future__ import annotations

import ast
import os
import re
import sysconfig
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from random import Random

_SKIPPED = ("test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "encodings", "__pycache__")
#: The fields of statements that hold other statements, or the parts of a statement that do.
_NESTED = ("body", "orelse", "handlers", "finalbody", "cases")
_PLAIN = re.compile(r"[A-Z][A-Za-z ,;'()-]{20,110}\.")


def _sources() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in _SKIPPED]  # these are not entered
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found)


def _docstrings_of(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) for node in _blocks(tree) if isinstance(node, kinds))
    return [text for text in texts if text]


def _blocks(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of ``ast.walk`` in its order, without expressions, which have no docstrings."""
    waiting = deque([tree])
    while waiting:
        node = waiting.popleft()
        yield node
        for field in node._fields:
            if field in _NESTED:
                waiting.extend(getattr(node, field))


@lru_cache(maxsize=1)
def docstrings() -> tuple[str, ...]:
    """Every docstring of the standard library, in a fixed order, without duplicates."""
    return tuple(dict.fromkeys(text for path in _sources() for text in _docstrings_of(path)))


@lru_cache(maxsize=1)
def sentences() -> tuple[str, ...]:
    """The simple sentences in the docstrings: words and commas only, of moderate length."""
    flat = (re.sub(r"\s+", " ", text) for text in docstrings())
    return tuple(dict.fromkeys(found for text in flat for found in _PLAIN.findall(text)))


def sentence(rng: Random) -> str:
    """One plain sentence."""
    return rng.choice(sentences())
