"""A GGUF file by every way to name a model: served, offline and on the command line."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon import LLM
from antiphon.shared.flags import SettingsError
from tests.gguf_files import Kind, write_gguf
from tests.models import greedy_reference, make_model
from tests.system.offline import FLAGS, GREEDY, generate
from tests.system.served import ROOT, Served, fetch, until_the_end
from tests.unit.shared.hub_server import NAME, write_cache

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
PROMPT = "What is 12 + 7?"
HUB_NAME = f"{NAME}:q4_0"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`model`: a directory with nothing but the file; `plain`: what it stands for; `home`: a home of its own."""
    at = tmp_path_factory.mktemp("gguf")
    (at / "folder").mkdir()
    plain = write_gguf(make_model(at / "source", "qwen2", seed=3), at / "m.gguf", Kind.Q4_0)
    (at / "m.gguf").rename(at / "folder" / "m.gguf")
    (at / "home").mkdir(mode=0o700)
    write_cache(at, {"config.json": b"{}", "sub/m-Q4_0.gguf": (at / "folder" / "m.gguf").read_bytes()})
    return {"file": at / "folder" / "m.gguf", "folder": at / "folder", "plain": plain, "home": at / "home"}


@pytest.fixture(autouse=True)
def _home(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.shared.models.gguf_model.directory._CACHE", str(files["home"] / "cache"))


def expected(files: dict[str, Path]) -> str:
    with LLM(str(files["plain"]), **FLAGS) as llm:
        answer = generate(llm, PROMPT, GREEDY)[0]
    assert answer.prompt_token_ids is not None
    tokens = greedy_reference(files["plain"], list(answer.prompt_token_ids), GREEDY.max_tokens or 0)
    assert list(answer.outputs[0].token_ids) == tokens[: len(answer.outputs[0].token_ids)]
    return answer.outputs[0].text or ""


@pytest.fixture(scope="module", params=["file", "folder", "hub"])
def served(request: pytest.FixtureRequest, files: dict[str, Path]) -> Iterator[Served]:
    cache = Path("~/.cache/antiphon/cpu").expanduser()
    model = HUB_NAME if request.param == "hub" else str(files[request.param])
    flags = (model, f"--compile-cache={cache}", "--dtype=float32")
    environ = {"HOME": str(files["home"]), "HF_HOME": str(files["home"].parent), "HF_HUB_OFFLINE": "1"}
    with until_the_end(Served(*flags, environ=environ)) as started:
        yield started


@pytest.mark.nats
def test_the_server_answers_as_the_weights_that_the_file_stands_for(served: Served, files: dict[str, Path]) -> None:
    [card] = fetch(served, "GET", "/v1/models").json["data"]
    # The path as given, not that of the converted file; requests may name it too.
    expected_names = (("m", str(files["file"])), ("folder", str(files["folder"])), (HUB_NAME, HUB_NAME))
    assert (card["id"], card["root"]) in expected_names
    name = card["root"]
    body: dict[str, Any] = {"model": name, "prompt": PROMPT, "temperature": 0, "max_tokens": GREEDY.max_tokens}
    assert fetch(served, "POST", "/v1/completions", body).json["choices"][0]["text"] == expected(files)
    chat = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    answer = fetch(served, "POST", "/v1/chat/completions", chat)
    assert answer.status == 200, answer.body
    # The template of the file writes more than the text.
    assert answer.json["usage"]["prompt_tokens"] > 8


@pytest.mark.parametrize("given", ["file", "folder"])
def test_the_offline_api_answers_as_the_weights_that_the_file_stands_for(given: str, files: dict[str, Path]) -> None:
    with LLM(model=str(files[given]), **FLAGS) as llm:
        assert generate(llm, PROMPT, GREEDY)[0].outputs[0].text == expected(files)


def test_a_quantizer_that_contradicts_the_file_is_refused(files: dict[str, Path]) -> None:
    with pytest.raises(
        (SettingsError, ValueError), match="ifq contradicts the model, whose weights are prepared with gguf"
    ):
        LLM(model=str(files["file"]), quantization="ifq", **FLAGS)


def test_a_damaged_file_is_refused_before_anything_starts(files: dict[str, Path], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(files["file"].read_bytes()[:5000])
    argv = [sys.executable, "-m", "antiphon", "serve", str(damaged), "--port=0"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert f"--model: {damaged} is damaged: " in done.stderr
    assert "Traceback" not in done.stderr
