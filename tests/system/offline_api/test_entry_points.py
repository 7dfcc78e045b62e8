"""The system as others start it: the direct entry point, the wrapper of containers, a name on the hub without text."""

import asyncio
import json
import re
import ssl
from pathlib import Path
from typing import Any

import openai
import pytest

from antiphon.async_client import get
from tests.models import greedy_reference
from tests.system.served import Served, fetch, until_the_end, wait_until
from tests.unit.shared.hub_server import NAME, write_cache

pytestmark = [pytest.mark.system, pytest.mark.nats]
DIRECT = ("antiphon.entrypoints.openai.api_server",)
PROMPT_IDS = list(range(10, 20))
HELLO = [{"role": "user", "content": "Hello"}]
TLS = Path(__file__).parents[1] / "tls"
"""A key and its certificate for localhost, signed by itself."""


def three_answers(served: Served) -> list[list[str]]:
    """To three equal requests that are drawn at random and bring no seed."""
    body = {"prompt": PROMPT_IDS, "max_tokens": 8, "n": 2, "temperature": 1.5, "ignore_eos": True}
    answers = [fetch(served, "POST", "/v1/completions", body).json for _ in range(3)]
    return [[choice["text"] for choice in answer["choices"]] for answer in answers]


@pytest.mark.spec("S-SRV-001:module", "S-SRV-031", "S-SRV-055", "S-SRV-061")
def test_runs_with_the_same_seed_answer_the_same_however_tokens_are_published(model: Path) -> None:
    flags = (f"--model={model}", "--max-num-seqs=4")
    with until_the_end(Served(*flags, "--use-warmup", "--disable-async-output-proc", command=DIRECT)) as started:
        direct = three_answers(started)
        # An engine may have answered before its line has come through the launcher.
        wait_until(lambda: re.search(r"^engine-1.* ready$", started.output, re.MULTILINE) is not None, 60)
        lines = [line for line in started.lines if line.startswith("engine-1")]
        [warm, ready] = [next(i for i, line in enumerate(lines) if text in line) for text in ("warmed up", " ready")]
        assert warm < ready
    with until_the_end(Served(*flags, "--seed=0")) as started:
        assert three_answers(started) == direct
    every = [text for answer in direct for text in answer]
    assert len(set(every)) == len(every) == 6


@pytest.mark.spec("S-SRV-002:start", "S-SRV-014", "S-SRV-015", "S-SRV-034:types", "S-SRV-059", "S-SRV-060")
async def test_a_container_serves_with_several_workers_and_what_is_too_much_waits(model: Path) -> None:
    environ = {"MODEL_PATH": str(model), "WORKER_NUM": "2", "MAX_CONCURRENCY": "1", "DS_DTYPE": "bfloat16"}
    environ |= {"MAX_BATCH_SIZE": "2", "BATCH_WAIT_TIMEOUT": "0.05"}
    command = ("antiphon", "run")
    with until_the_end(Served("--backend=deepspeed", environ=environ, command=command)) as served:
        assert {"engine-1", "engine-2"} < set(served.pids())
        async with openai.AsyncOpenAI(base_url=served.url, api_key="EMPTY", max_retries=0, timeout=60) as client:
            body = {"model": str(model), "prompt": "A", "max_tokens": 60, "extra_body": {"ignore_eos": True}}
            running: list[float] = []
            # All can end between two reports of an engine: more are sent until a report shows one.
            while 1 not in running:
                requests = [asyncio.create_task(client.completions.create(**body)) for _ in range(10)]
                while not all(request.done() for request in requests):
                    page = (await get("127.0.0.1", served.port, "/metrics")).body.decode()
                    running += map(float, re.findall(r"^vllm:num_requests_running{.*} (\S+)", page, re.MULTILINE))
                assert {(await request).choices[0].finish_reason for request in requests} == {"length"}
        assert max(running) == 1


def chat(served: Served, **fields: Any) -> Any:
    return fetch(served, "POST", "/v1/chat/completions", {"messages": HELLO, "seed": 3, "max_tokens": 40, **fields})


@pytest.mark.spec("S-SRV-002:start", "S-SRV-037", "S-DEP-030", "S-API-015:run", "S-DEP-042:run")
def test_a_container_is_asked_by_any_name_draws_at_its_own_temperature_and_computes_fast(model: Path) -> None:
    environ = {"MODEL_PATH": str(model), "MODEL_ID": "Foo", "TP": "1", "QUANTIZATION": "", "USE_OPENAI": "1"}
    with until_the_end(Served("--device=cpu", environ=environ, command=("antiphon", "run"))) as served:
        assert "the fast CPU backend is not used" not in served.output
        assert [card["id"] for card in fetch(served, "GET", "/v1/models").json["data"]] == ["Foo"]
        for name in ("Foo", "model", "default", str(model), None):
            answer = chat(served, model=name)
            assert (answer.status, answer.json["model"]) == (200, "Foo"), name
        assert chat(served, model="other").status == 404
        texts = [chat(served, **fields).json["choices"] for fields in ({}, {"temperature": 0.7}, {"temperature": 1.0})]
        assert texts[0] == texts[1] != texts[2]
    with until_the_end(Served(f"--model={model}")) as served:
        assert chat(served, model="model").status == 404
        assert chat(served).json["choices"] == chat(served, temperature=1.0).json["choices"]


async def test_a_server_is_shown_over_https_under_several_names(model: Path) -> None:
    files = (f"--ssl-keyfile={TLS / 'key.pem'}", f"--ssl-certfile={TLS / 'certificate.pem'}")
    names = ("--served-model-name", "first", "second", "--disable-log-requests", "--load-format=safetensors")
    with until_the_end(Served(f"--model={model}", *names, *files, command=DIRECT)) as served:
        assert served.url.startswith("https://")
        trusted = openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=TLS / "certificate.pem"))
        address = served.url.replace("0.0.0.0", "localhost").removesuffix("/v1") + "/v1"
        with openai.OpenAI(base_url=address, api_key="EMPTY", http_client=trusted, max_retries=0) as client:
            assert [card.id for card in client.models.list().data] == ["first"]
            for name in ("first", "second"):
                answer = client.completions.create(model=name, prompt="A", max_tokens=2)
                assert answer.model == "first"
        assert " POST /" not in served.output
        assert (await get("127.0.0.1", served.port, "/readyz")).status == 0
        assert (await get("127.0.0.1", served.port, "/readyz", https=True)).status == 200


@pytest.mark.spec("S-SRV-020", "S-SRV-024", "S-SRV-026")
def test_a_name_on_the_hub_is_served_without_text(model: Path, tmp_path: Path) -> None:
    files = ("config.json", "generation_config.json", "model.safetensors")
    write_cache(tmp_path, {name: (model / name).read_bytes() for name in files})
    environ = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    with until_the_end(Served(f"--model={NAME}", "--skip-tokenizer-init", environ=environ)) as served:
        assert [card["id"] for card in fetch(served, "GET", "/v1/models").json["data"]] == [NAME]
        body = {"prompt": PROMPT_IDS, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "model": NAME}
        [choice] = fetch(served, "POST", "/v1/completions", body).json["choices"]
        expected = greedy_reference(model, PROMPT_IDS, 8)
        assert (choice["token_ids"], choice["text"]) == (expected, "")
        chunks = fetch(served, "POST", "/v1/completions", {**body, "stream": True}).body.decode().split("\n\n")
        said = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks if "token_ids" in chunk]
        assert [token_id for choice in said for token_id in choice.get("token_ids") or ()] == expected
        for wrong, path in (
            ({"prompt": "text"}, "/v1/completions"),
            ({"prompt": PROMPT_IDS, "stop": "x"}, "/v1/completions"),
            ({"prompt": PROMPT_IDS, "echo": True}, "/v1/completions"),
            ({"messages": [{"role": "user", "content": "text"}]}, "/v1/chat/completions"),
        ):
            answer = fetch(served, "POST", path, wrong)
            assert answer.status == 400
            assert ("'echo' needs a tokenizer" in answer.json["error"]["message"]) == ("echo" in wrong)
            assert "--skip-tokenizer-init" in answer.json["error"]["message"]
