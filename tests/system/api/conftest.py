"""One system for all tests of the API: float32, so that it can be compared with transformers to the token."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.models import greedy_reference
from tests.system.api.asking import CONTEXT, PROMPT
from tests.system.served import Served, until_the_end


@pytest.fixture(scope="package")
def served(model: Path) -> Iterator[Served]:
    flags = ("--served-model-name=model", "--dtype=float32", f"--max-model-len={CONTEXT}")
    # The model's template shows no tools; a format in which a brace begins a call can be had from a random model.
    flags += ("--tool-call-parser=llama3_json",)
    # The rows of the specification say what is refused; what is told instead has tests of its own.
    flags += ("--long-outputs=refuse", "--unknown-parameters=refuse", '--allowed-hosts=["gateway.example"]')
    cache = ("--block-size=8", "--num_gpu_blocks_override=300")
    with until_the_end(Served(f"--model={model}", *flags, *cache)) as started:
        yield started


@pytest.fixture(scope="package")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.fixture(scope="package")
def greedy(model: Path, tokenizer: Tokenizer) -> list[int]:
    """The tokens that transformers puts after PROMPT. None of them is special."""
    return greedy_reference(model, tokenizer.encode(PROMPT).ids, 32)
