"""A system without OpenAI's API (`USE_OPENAI=0`), whose model has the special tokens for filling in text."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.models import greedy_reference
from tests.system.served import Served, fetch, serve_tiny, until_the_end
from tests.tokenizer_files import token_id

NAMES = {
    "<|filler_328|>": "<|fim_prefix|>",
    "<|filler_329|>": "<|fim_suffix|>",
    "<|filler_330|>": "<|fim_middle|>",
}


@pytest.fixture(scope="module")
def coder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with three of its unused tokens renamed."""
    directory = tmp_path_factory.mktemp("coder") / "model"
    shutil.copytree(model, directory)
    path = directory / "tokenizer.json"
    data = path.read_text()
    for old, new in NAMES.items():
        assert old in data
        data = data.replace(old, new)
    path.write_text(data)
    return directory


@pytest.fixture(scope="module")
def served(coder: Path) -> Iterator[Served]:
    with until_the_end(serve_tiny(coder, "--dtype=float32", environ={"USE_OPENAI": "0"})) as started:
        yield started


@pytest.mark.spec("S-API-003")
def test_only_generate_and_the_probes_are_served_and_models_are_not_named(served: Served) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        reply = fetch(served, "POST", path, {"prompt": "A"})
        assert reply.status == 404
        assert "USE_OPENAI=0" in reply.json["error"]["message"]
    assert fetch(served, "GET", "/v1/models").status == 404
    assert [fetch(served, "GET", path).status for path in ("/health", "/livez", "/readyz", "/metrics")] == [200] * 4
    asked = {"prompt": "A", "max_tokens": 4, "temperature": 0}
    plain = fetch(served, "POST", "/generate", asked)
    assert plain.status == 200
    assert fetch(served, "POST", "/generate", {**asked, "model": "any name"}).json == plain.json
    assert "/generate" in served.output
    assert "antiphon chat" not in served.output


@pytest.mark.spec("S-API-028")
def test_a_suffix_asks_for_the_text_between(served: Served, coder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(coder / "tokenizer.json"))
    first, second, third = (token_id(tokenizer, name) for name in NAMES.values())
    before, after = tokenizer.encode("def f(x):").ids, tokenizer.encode(" return x").ids
    expected = greedy_reference(coder, [first, *before, second, *after, third], 6)
    asked = {"prompt": "def f(x):", "suffix": " return x", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    reply = fetch(served, "POST", "/generate", asked)
    assert reply.json == {"text": ["def f(x):" + tokenizer.decode(expected)]}, json.dumps(reply.json)
