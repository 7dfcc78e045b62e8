"""The four standard loads, and prompts with an exact number of tokens for them.

A prompt consists of words that are one token each, so its length is known in advance. Each seed gives different
prompts, so that no prompt is in a prefix cache that an earlier load has filled. `measure` sends the prompts.
"""

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

WORD = re.compile("[\u0120\u2581][A-Za-z]{2,12}")
"""Matches a token that is a space and letters, in the notation of byte-level BPE and of sentencepiece."""
WORDS_MIN = 100


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop: each of `clients` sends its next request when its last one has ended. Lengths are in tokens."""

    name: str
    clients: int
    prompt: int
    """Length of the part of the prompt that differs between requests, after the shared part."""
    output: int
    requests: int
    warmup: int
    """Number of requests before those that are measured."""
    shared: int = 0
    """Length of the prefix that all prompts share. A separate request first brings it into the server's cache."""

    def short(self) -> "Load":
        """Returns a shorter load for a rehearsal: one request per client, and at most one warm-up request."""
        return replace(self, requests=self.clients, warmup=min(self.warmup, 1))

    @property
    def prompt_length(self) -> int:
        """Number of tokens of each prompt, including the shared prefix."""
        return self.shared + self.prompt


LOADS = (
    Load("c1", clients=1, prompt=128, output=64, requests=8, warmup=2),
    Load("c8", clients=8, prompt=256, output=64, requests=24, warmup=8),
    Load("c32", clients=32, prompt=256, output=64, requests=64, warmup=4),
    Load("shared", clients=8, prompt=32, output=32, requests=32, warmup=8, shared=1024),
)


def chosen(names: list[str], short: bool) -> list[Load]:
    """Returns the standard loads with these names, shortened if `short`."""
    return [load.short() if short else load for load in LOADS if load.name in names]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, both as text and as token ids."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class DrawnPrompts:
    """The prompts of one load, in the order in which they are sent: `prime`, `warmup`, `measured`."""

    prime: list[Prompt]
    """The prompt that brings the shared prefix into the cache; empty if the load has no shared prefix."""
    warmup: list[Prompt]
    measured: list[Prompt]


class Prompts:
    """Draws prompts for the model of a directory.

    Raises SystemExit if the tokenizer has fewer than `WORDS_MIN` words of one token.
    """

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        tokens = sorted((text, index) for text, index in self._tokenizer.get_vocab().items() if WORD.fullmatch(text))
        words = [" " + text[1:] for text, _ in tokens]
        encoded = [encoding.ids for encoding in self._tokenizer.encode_batch(words, add_special_tokens=False)]
        self._words = [(word, i) for word, (_, i), ids in zip(words, tokens, encoded, strict=True) if ids == [i]]
        if len(self._words) < WORDS_MIN:
            raise SystemExit(f"{model}: only {len(self._words)} words of one token; {WORDS_MIN} are needed")

    def draw(self, load: Load, seed: int) -> DrawnPrompts:
        """Returns all prompts of a load. The same seed gives the same prompts."""
        shared = self._some(f"{seed}/shared", load.shared)

        def several(kind: str, count: int) -> list[Prompt]:
            return [self._prompt(shared + self._some(f"{seed}/{kind}/{i}", load.prompt)) for i in range(count)]

        prime = several("prime", int(load.shared > 0))
        return DrawnPrompts(prime, several("warm", load.warmup), several("measured", load.requests))

    def _some(self, key: str, count: int) -> list[tuple[str, int]]:
        draw = random.Random(key)
        return [self._words[draw.randrange(len(self._words))] for _ in range(count)]

    def _prompt(self, words: list[tuple[str, int]]) -> Prompt:
        text, token_ids = "".join(word for word, _ in words), [index for _, index in words]
        if self._tokenizer.encode(text, add_special_tokens=False).ids != token_ids:
            raise SystemExit("this tokenizer joins words: the length of a prompt cannot be told")
        return Prompt(text, token_ids)
