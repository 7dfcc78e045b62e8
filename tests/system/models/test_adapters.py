"""LoRA adapters of a server: named at its start, loaded, replaced and unloaded while two engines serve requests."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.adapters import make_adapter, make_prompt_adapter, merge, prompted_reference
from tests.models import greedy_reference, make_model
from tests.system.served import ROOT, Served, fetch, serve_tiny, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.model, pytest.mark.timeout(240)]
PROMPT, NUM = "Once upon a time", 12
NAMES = ("sql", "tales", "third", "fourth")


@pytest.fixture(scope="module")
def paths(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(made / name, model, seed=seed) for seed, name in enumerate(NAMES, 1)}


@pytest.fixture(scope="module")
def outputs(model: Path, paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """What transformers generates with the merged weights of each adapter, and with the model alone ("tiny")."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(PROMPT).ids
    made = tmp_path_factory.mktemp("merged")
    merged = {name: merge(made / name, model, path) for name, path in paths.items()}
    found = {name: greedy_reference(path, ids, NUM) for name, path in (merged | {"tiny": model}).items()}
    assert len(set(map(tuple, found.values()))) == len(found)
    return found


@pytest.fixture(scope="module")
def soft(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_prompt_adapter(tmp_path_factory.mktemp("soft"), model, num_tokens=7)


@pytest.fixture(scope="module")
def pair(model: Path, paths: dict[str, Path], soft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two engines and two gateways, with two adapters at the start, in the two forms of `--lora-modules`."""
    named = {"name": "tales", "path": str(paths["tales"]), "base_model_name": "tiny"}
    flags = ("--lora-modules", f"sql={paths['sql']}", json.dumps(named), "--engines=2", "--gateways=2", "--threads=1")
    flags += ("--prompt-adapters", f"soft={soft}", "--lora-root", str(tmp_path_factory.getbasetemp()))
    with until_the_end(serve_tiny(model, "--dtype=float32", "--max-cpu-loras=16", *flags)) as started:
        yield started


def ask(served: Served, model: str, **fields: Any) -> Any:
    body = {"model": model, "prompt": PROMPT, "max_tokens": NUM, "temperature": 0, "return_token_ids": True}
    return fetch(served, "POST", "/v1/completions", body | {"ignore_eos": True} | fields)


def ids(answer: Any) -> list[int]:
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["token_ids"]


def load(served: Served, name: str, path: Path | str, **fields: Any) -> Any:
    return fetch(served, "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **fields})


def unload(served: Served, name: str) -> Any:
    return fetch(served, "POST", "/v1/unload_lora_adapter", {"lora_name": name})


def names(served: Served) -> list[str]:
    return [card["id"] for card in fetch(served, "GET", "/v1/models").json["data"]]


@pytest.mark.spec("S-SRV-030", "S-API-010:lora")
def test_the_model_field_selects_the_model_or_an_adapter(pair: Served, outputs: dict[str, list[int]]) -> None:
    for name in ("tiny", "sql", "tales", "sql", "tiny"):
        answer = ask(pair, name)
        assert (ids(answer), answer.json["model"]) == (outputs[name], name)
    unknown = ask(pair, "fables")
    assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")


def test_adapters_are_listed_with_the_model_that_they_belong_to(pair: Served, paths: dict[str, Path]) -> None:
    cards = {card["id"]: card for card in fetch(pair, "GET", "/v1/models").json["data"]}
    assert list(cards) == ["tiny", "soft", "sql", "tales"]
    assert [card["parent"] for card in cards.values()] == [None, "tiny", "tiny", "tiny"]
    assert [card["max_model_len"] for card in cards.values()] == [512, 505, 512, 512]
    assert cards["sql"]["root"] == str(paths["sql"])
    assert fetch(pair, "GET", "/v1/models/tales").json == cards["tales"]


def test_every_endpoint_takes_an_adapter_s_name(pair: Served) -> None:
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6, "temperature": 0}
    answers = {
        name: fetch(pair, "POST", "/v1/chat/completions", chat | {"model": name}).json for name in ("tiny", "sql")
    }
    texts = [answer["choices"][0]["message"]["content"] for answer in answers.values()]
    assert texts[0] != texts[1]
    assert answers["tiny"]["system_fingerprint"] != answers["sql"]["system_fingerprint"]
    message = fetch(pair, "POST", "/v1/messages", {**chat, "model": "sql"}).json
    assert (message["model"], message["content"][0]["text"]) == ("sql", texts[1])
    response = {"model": "sql", "input": PROMPT, "max_output_tokens": 6, "temperature": 0}
    assert fetch(pair, "POST", "/v1/responses", response).json["output"][0]["content"][0]["text"] == texts[1]
    ollama = fetch(pair, "POST", "/api/chat", {"model": "sql", "messages": chat["messages"], "stream": False,
                                               "options": {"temperature": 0, "num_predict": 6}})  # fmt: skip
    assert ollama.json["message"]["content"] == texts[1]
    native = {"model": "sql", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    assert fetch(pair, "POST", "/generate", native).status == 200
    vectors = [
        fetch(pair, "POST", "/v1/embeddings", {"model": name, "input": PROMPT}).json["data"][0]["embedding"]
        for name in ("tiny", "sql")
    ]
    assert vectors[0] != vectors[1]
    tokens = fetch(pair, "POST", "/tokenize", {"model": "sql", "prompt": PROMPT}).json["tokens"]
    assert fetch(pair, "POST", "/detokenize", {"model": "sql", "tokens": tokens}).json["prompt"] == PROMPT


def test_a_prompt_adapter_is_selected_by_its_name(pair: Served, model: Path, soft: Path) -> None:
    prompt = fetch(pair, "POST", "/tokenize", {"model": "soft", "prompt": PROMPT}).json["tokens"]
    expected = prompted_reference(model, soft, prompt, NUM)
    for _ in range(3):
        answer = ask(pair, "soft")
        assert ids(answer) == expected
        assert answer.json["usage"]["prompt_tokens"] == len(prompt)
    refused = ask(pair, "soft", prompt_logprobs=1)
    assert (refused.status, "virtual tokens" in refused.json["error"]["message"]) == (400, True)
    longest = ask(pair, "soft", prompt=[5] * 505, max_tokens=1)
    assert (longest.status, longest.json["error"]["code"]) == (400, "context_length_exceeded")
    assert ask(pair, "soft", prompt=[5] * 504, max_tokens=1).status == 200


def test_the_prefix_cache_keeps_adapters_apart(pair: Served) -> None:
    prompt = "word " * 80
    cached = {}
    for name in ("tiny", "sql", "tales"):
        for _ in range(4):  # either engine may have been asked before
            usage = ask(pair, name, prompt=prompt, max_tokens=1).json["usage"]
            cached.setdefault(name, []).append(usage["prompt_tokens_details"]["cached_tokens"])
    # Of four requests, one at least goes to an engine that has computed the prompt.
    assert all(counts[0] == 0 and max(counts) > 0 for counts in cached.values()), cached


def test_an_adapter_is_loaded_used_replaced_and_unloaded(
    pair: Served, paths: dict[str, Path], outputs: dict[str, list[int]]
) -> None:
    answer = load(pair, "new", paths["third"])
    assert (answer.status, answer.body) == (200, b"Success: LoRA adapter 'new' added successfully.")
    wait_until(lambda: all("new" in names(pair) for _ in range(6)), 60)  # both gateways know it
    assert all(ids(ask(pair, "new")) == outputs["third"] for _ in range(6))
    again = load(pair, "new", paths["fourth"])
    assert (again.status, "has already been loaded" in again.json["error"]["message"]) == (400, True)
    assert load(pair, "new", paths["fourth"], load_inplace=True).status == 200
    wait_until(lambda: all(ids(ask(pair, "new")) == outputs["fourth"] for _ in range(6)), 60)
    gone = unload(pair, "new")
    assert (gone.status, gone.body) == (200, b"Success: LoRA adapter 'new' removed successfully.")
    wait_until(lambda: all(ask(pair, "new").status == 404 for _ in range(6)), 60)
    missing = unload(pair, "new")
    assert (missing.status, missing.json["error"]["message"]) == (404, "The LoRA adapter 'new' cannot be found.")


def test_what_cannot_be_loaded_is_refused_and_changes_nothing(
    pair: Served, model: Path, paths: dict[str, Path], tmp_path: Path
) -> None:
    before = names(pair)
    large = make_adapter(tmp_path / "large", model, rank=64)
    for name, path, status, said in (
        ("x", tmp_path / "nowhere", 404, f"there is no directory {tmp_path / 'nowhere'}"),
        ("x", "/nowhere", 400, "its directory is not below one of those of --lora-root"),
        ("x", large, 400, "its rank is 64, above --max-lora-rank=16"),
        ("x", make_adapter(tmp_path / "dora", model, use_dora=True), 400, "DoRA adapters are not supported"),
        ("tiny", paths["sql"], 400, "A model is called 'tiny'"),
        ("sql", paths["third"], 400, "has already been loaded"),
        (" x", paths["third"], 400, "'lora_name' must be printable"),
        ("", paths["third"], 400, "'lora_name' must not be empty"),
    ):
        answer = load(pair, name, path)
        assert (answer.status, said in answer.json["error"]["message"]) == (status, True), answer.body
    body = fetch(pair, "POST", "/v1/load_lora_adapter", {"lora_name": "x"})
    assert (body.status, body.json["error"]["code"]) == (400, "missing_required_parameter")
    other = load(pair, "x", paths["third"], base_model_name="nobody")
    assert (other.status, other.json["error"]["code"]) == (404, "model_not_found")
    assert names(pair) == before


async def test_no_request_sees_a_wrong_adapter_while_adapters_are_replaced(
    pair: Served, paths: dict[str, Path], outputs: dict[str, list[int]]
) -> None:
    """Streams without a pause, while one name is loaded, replaced and unloaded over and over."""
    stop = asyncio.Event()
    seen: dict[str, int] = dict.fromkeys(("third", "fourth", "gone"), 0)
    right = {tuple(outputs[name]): name for name in ("third", "fourth")}

    async def stream(client: openai.AsyncOpenAI, name: str) -> None:
        while not stop.is_set():
            try:
                answer = await client.completions.create(
                    model=name, prompt=PROMPT, max_tokens=NUM, temperature=0,
                    extra_body={"return_token_ids": True, "ignore_eos": True},
                )  # fmt: skip
            except openai.NotFoundError:
                assert name == "moving"
                seen["gone"] += 1
                await asyncio.sleep(0.01)
                continue
            found = tuple(answer.choices[0].token_ids)  # type: ignore[attr-defined]
            if name == "moving":
                seen[right[found]] += 1
            else:
                assert list(found) == outputs[name]

    async def until_seen(name: str) -> None:
        before = seen[name]
        async with asyncio.timeout(60):
            while seen[name] == before:
                await asyncio.sleep(0.2)

    async def change() -> None:
        try:
            for _ in range(3):
                assert (await asyncio.to_thread(load, pair, "moving", paths["third"])).status == 200
                await until_seen("third")
                for name in ("fourth", "third"):
                    replaced = await asyncio.to_thread(load, pair, "moving", paths[name], load_inplace=True)
                    assert replaced.status == 200
                    await until_seen(name)
                assert (await asyncio.to_thread(unload, pair, "moving")).status == 200
                await until_seen("gone")
        finally:
            stop.set()

    async with openai.AsyncOpenAI(base_url=pair.url, api_key="EMPTY", max_retries=0, timeout=60) as client:
        await asyncio.gather(change(), *(stream(client, name) for name in ("moving",) * 6 + ("tiny", "sql", "tales")))
    assert min(seen.values()) > 0, seen


async def test_streams_with_adapters_survive_the_loss_of_an_engine_and_its_successor_has_all_adapters(
    pair: Served, paths: dict[str, Path], outputs: dict[str, list[int]]
) -> None:
    assert load(pair, "late", paths["third"]).status == 200
    wait_until(lambda: all("late" in names(pair) for _ in range(6)), 60)
    long = {"max_tokens": 300, "ignore_eos": True}
    alone = {name: ids(ask(pair, name, **long)) for name in ("sql", "late", "tiny")}
    tasks = [asyncio.create_task(asyncio.to_thread(ask, pair, name, **long)) for name in alone for _ in range(4)]
    await asyncio.sleep(0.3)
    os.kill(pair.pids()["engine-1"], signal.SIGKILL)
    for name, answer in zip([name for name in alone for _ in range(4)], await asyncio.gather(*tasks), strict=True):
        assert ids(answer) == alone[name]
    # The launcher starts the engine again. Without the other one, it has to serve every adapter by itself.
    await asyncio.sleep(1)
    wait_until(lambda: "engine-1" in pair.pids(), 60)
    os.kill(pair.pids()["engine-2"], signal.SIGSTOP)
    try:
        deadline = time.monotonic() + 60
        for name in ("late", "sql", "tiny"):
            answer = await asyncio.to_thread(ask, pair, name)
            while answer.status == 503 and time.monotonic() < deadline:
                await asyncio.sleep(0.5)
                answer = await asyncio.to_thread(ask, pair, name)
            assert ids(answer) == outputs["third" if name == "late" else name]
    finally:
        os.kill(pair.pids()["engine-2"], signal.SIGCONT)
    assert unload(pair, "late").status == 200


@pytest.mark.spec("S-SRV-030")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "--lora-modules: 'nothing' is not name=path, or JSON"),
        (["=x"], "is not name=path"),
        (['{"name": "a"}'], "needs a text 'path'"),
        (['{"name": "a", "path": "p", "rank": 4}'], "has the unknown key 'rank'"),
        (['{"name": '], "is not valid JSON"),
        (["a=/nowhere"], "there is no directory /nowhere"),
        (["a={sql}", "a={tales}"], "two adapters are called 'a'"),
        (["tiny={sql}"], "'tiny' is the model's own name"),
        (['{"name": "a", "path": "{sql}", "base_model_name": "other"}'], "is for the model 'other'"),
        (["a={sql}", "--max-lora-rank=2"], "its rank is 4, above --max-lora-rank=2"),
        (["a={sql}", "--max-loras=4", "--max-cpu-loras=2"], "--max-cpu-loras: 2 is less than --max-loras (4)"),
        (["--max-loras=4"], "--max-loras needs --enable-lora or --lora-modules"),
        (["--max-prompt-adapters=4"], "--max-prompt-adapters needs --enable-prompt-adapter"),
        (["--prompt-adapters", "a={sql}"], "--prompt-adapters: The adapter 'a' cannot be served: its peft_type is"),
        (["a={sql}", "--prompt-adapters", "a={soft}"], "two adapters are called 'a'"),
        (["--prompt-adapters", "a={soft}", "--max-prompt-adapter-token=6"], "it has 7 virtual tokens, more than"),
    ],
)
def test_a_wrong_module_ends_the_start_with_78_before_anything_runs(
    words: list[str], said: str, model: Path, paths: dict[str, Path], soft: Path
) -> None:
    for name, path in (paths | {"soft": soft}).items():
        words = [word.replace(f"{{{name}}}", str(path)) for word in words]
    flag = () if words[0].startswith("--") else ("--lora-modules",)
    ended = _start(model, *flag, *words)
    assert (ended.returncode, said in ended.stderr) == (78, True), ended.stderr


def test_a_wrong_tensor_ends_the_start_and_is_named(model: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", hidden_size=32, intermediate_size=64)
    adapter = make_adapter(tmp_path / "adapter", other)
    ended = _start(model, "--lora-modules", f"a={adapter}")
    assert ended.returncode == 78, ended.stdout + ended.stderr
    assert "The adapter 'a' cannot be served: base_model.model.model.layers.0" in ended.stdout + ended.stderr


def _start(model: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-m", "antiphon", "serve", "--port=0", f"--model={model}", "--served-model-name=tiny"]
    words += ["--kv-cache-memory-gb=0.05", *flags]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
