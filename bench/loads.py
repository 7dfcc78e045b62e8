"""The four standard loads, and prompts of an exact number of tokens for them.

A prompt is made of words that are one token each, so its length is known without asking anybody. Each seed gives other
prompts: none is found in a cache that an earlier load has filled. Who sends them is `bench.measure`'s matter.
"""

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

WORD = re.compile("[\u0120\u2581][A-Za-z]{2,12}")
"""A token that is a space and letters, as byte-level BPE and sentencepiece write it."""
WORDS_MIN = 100


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop: `clients` at once, each sends its next request when the last one has ended. Lengths in tokens."""

    name: str
    clients: int
    prompt: int
    """Of each request's own, behind the shared part."""
    output: int
    requests: int
    warmup: int
    """Requests before those that count."""
    shared: int = 0
    """In front, the same in all; a request of its own brings it into the server's cache first."""

    def short(self) -> "Load":
        """For a rehearsal: one wave, and little before it."""
        return replace(self, requests=self.clients, warmup=min(self.warmup, 1))

    @property
    def prompt_length(self) -> int:
        """Tokens of each prompt."""
        return self.shared + self.prompt


LOADS = (
    Load("c1", clients=1, prompt=128, output=64, requests=8, warmup=2),
    Load("c8", clients=8, prompt=256, output=64, requests=24, warmup=8),
    Load("c32", clients=32, prompt=256, output=64, requests=64, warmup=4),
    Load("shared", clients=8, prompt=32, output=32, requests=32, warmup=8, shared=1024),
)


def chosen(names: list[str], short: bool) -> list[Load]:
    """The standard loads of these names."""
    return [load.short() if short else load for load in LOADS if load.name in names]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The same prompt twice."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class DrawnPrompts:
    """The prompts of one load, in the order in which they are sent."""

    prime: list[Prompt]
    """One where there is a shared part, else none."""
    warmup: list[Prompt]
    measured: list[Prompt]


class Prompts:
    """Draws prompts for the model of a directory. Raises SystemExit where its tokenizer has too few plain words."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        tokens = sorted((text, index) for text, index in self._tokenizer.get_vocab().items() if WORD.fullmatch(text))
        words = [" " + text[1:] for text, _ in tokens]
        encoded = [encoding.ids for encoding in self._tokenizer.encode_batch(words, add_special_tokens=False)]
        self._words = [(word, i) for word, (_, i), ids in zip(words, tokens, encoded, strict=True) if ids == [i]]
        if len(self._words) < WORDS_MIN:
            raise SystemExit(f"{model}: only {len(self._words)} words of one token; {WORDS_MIN} are needed")

    def draw(self, load: Load, seed: int) -> DrawnPrompts:
        """All prompts of a load; the same ones for the same seed."""
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
