"""Digests of a tokenizer's files and of a chat template, by which receipts identify them."""

import hashlib
from pathlib import Path

from antiphon.shared.text.codec import TextFacts

_NAMES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Files of tokenizers, in the order in which they are hashed; with those that end with `.tiktoken`."""


def tokenizer_digest(directory: Path) -> str:
    """Returns the SHA-256 of the names, sizes and contents of the tokenizer's files; "" if there are none."""
    digest, is_empty = hashlib.sha256(), True
    for path in (*(directory / name for name in _NAMES), *sorted(directory.glob("*.tiktoken"))):
        if path.is_file():
            data, is_empty = path.read_bytes(), False
            digest.update(f"{path.name}\0{len(data)}\0".encode() + data)
    return "" if is_empty else digest.hexdigest()


def template_digest(facts: TextFacts) -> str:
    """Returns the SHA-256 of the chat template and of a separate one for requests with tools; "" without any."""
    if facts.chat_template is None:
        return ""
    texts = [facts.chat_template] + ([facts.tool_template] if facts.tool_template is not None else [])
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
