"""Text that a grammar forces: its tokens are those of the whole text, although only its beginning is encoded."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLTokenizer

from antiphon.shared.config import EngineSettings
from antiphon.shared.models.model_files import DEMO_DIRECTORY
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.text.grammars import constraint
from tests import tokenizer_files

END = 0
SIZE = 4200
WORDS = (
    "the",
    "engine",
    " sings",
    "  Two",
    "\n",
    "12345",
    "it's",
    "Zażółć",
    "gęślą",
    "好的",
    "x=3;",
    "foo(bar)",
    "aaaaaaa",
)


@pytest.fixture(scope="module", params=["demo", "byte level", "byte fallback"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "demo":
        return DEMO_DIRECTORY
    made = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tokenizer_files.byte_level() if request.param == "byte level" else tokenizer_files.byte_fallback()
    tokenizer.save(str(made / "tokenizer.json"))
    return made


def ours(directory: Path, mode: str = "auto", size: int = SIZE) -> LLTokenizer:
    return constraint.model_tokenizer(EngineSettings(tokenizer_mode=mode), directory, directory, [END], size)


def allowed(mask: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def grammars(seed: int) -> Iterator[Grammar]:
    """Grammars with long and short texts that are forced."""
    draw = random.Random(seed)
    for count in (1, 8, 40, 150):
        text = "".join(draw.choice(WORDS) for _ in range(count))
        yield Grammar("regex", re.escape(text) + draw.choice(["", ".*", "(a|b)"]))
        yield Grammar("choice", json.dumps([text + "a", text + "b", "c"]))
        yield Grammar("json", json.dumps({"properties": {text: {"const": text}}, "required": [text]}))


@pytest.mark.parametrize("seed", range(3))
def test_masks_are_those_of_the_library_s_own_tokenizer(directory: Path, seed: int) -> None:
    own = LLTokenizer((directory / "tokenizer.json").read_text(), n_vocab=SIZE, eos_token=[END])
    tokenizer, draw = ours(directory), random.Random(seed)
    for grammar in grammars(seed):
        expected, found = (constraint.compile_grammar(grammar, one) for one in (own, tokenizer))
        for _ in range(120):
            mask = allowed(expected.compute_bitmask())
            assert allowed(found.compute_bitmask()) == mask
            if expected.is_stopped() or mask == [END]:
                break
            token_id = draw.choice([one for one in mask if one != END])
            assert expected.consume_token(token_id)
            assert found.consume_token(token_id)


def test_the_beginning_of_a_forced_text_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library asks for the tokens of the whole rest each time; what it gets encoded is short."""
    lengths = list[int]()
    make = constraint._Tokens  # pyright: ignore[reportPrivateUsage]

    class Counted(make):
        def __call__(self, text: bytes) -> list[int]:
            tokens = super().__call__(text)
            lengths.append(sum(len(self.tokens[one]) for one in tokens))
            return tokens

    monkeypatch.setattr(constraint, "_Tokens", Counted)
    matcher = constraint.compile_grammar(Grammar("regex", "a{60000}"), ours(DEMO_DIRECTORY))
    for _ in range(50):
        [token_id] = allowed(matcher.compute_bitmask())
        assert matcher.consume_token(token_id)
    assert len(lengths) > 50
    assert max(lengths) < 1000


@pytest.mark.parametrize("text", ["hello", "the engine sings, and the gateway answers", "a" * 3000])
def test_a_tokenizer_without_a_file_of_its_own_forces_text_too(text: str) -> None:
    tokenizer = ours(DEMO_DIRECTORY, "slow", 0)
    matcher = constraint.compile_grammar(Grammar("regex", re.escape(text)), tokenizer)
    tokens = list[int]()
    while (mask := allowed(matcher.compute_bitmask())) != [END]:
        tokens += mask[:1]
        assert matcher.consume_token(mask[0]), matcher.get_error()
    assert tokenizer.decode_bytes(tokens).decode() == text
