"""A system that is configured by the environment: keys, names, limits; and settings that are refused."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from antiphon.async_client import get
from antiphon.cli import main
from antiphon.services.engine.backends.load import load_worker
from antiphon.shared.config import EngineSettings, GatewaySettings
from tests.conftest import free_port
from tests.system.served import ROOT, Served, fetch, until_the_end

pytestmark = [pytest.mark.system, pytest.mark.nats]
CONTEXT = 160
CACHE_GB = 0.00025
"""Less than two sequences can use, so that the share of it that is used shows in the number of blocks."""
PROMPT_IDS = list(range(10, 20))


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    environ = {"MODEL_PATH": str(model), "DTYPE": "bfloat16", "MAX_MODEL_LEN": str(CONTEXT), "SEED": ""}
    environ |= {"GPU_MEMORY_UTILIZATION": "0.5", "OPENAI_API_KEYS": " first-key, ,second-key,"}
    flags = ("--host=127.0.0.1", f"--port={free_port()}", "--max-num-seqs=2", f"--kv-cache-memory-gb={CACHE_GB}")
    with until_the_end(Served(*flags, environ=environ)) as started:
        yield started


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url, api_key="first-key", max_retries=0, timeout=60) as made:
        yield made


@pytest.mark.spec("S-DEP-032", "S-DEP-036a", "S-SRV-012", "S-SRV-032")
def test_model_and_context_come_from_the_environment(client: openai.OpenAI, model: Path) -> None:
    [card] = client.models.list().data
    assert (card.id, card.to_dict()["root"]) == (model.name, str(model))
    assert card.to_dict()["max_model_len"] == CONTEXT
    with pytest.raises(openai.BadRequestError, match=str(CONTEXT)):
        client.completions.create(model=card.id, prompt=[5] * CONTEXT, max_tokens=1)
    told = client.completions.with_raw_response.create(model=card.id, prompt="A", max_tokens=CONTEXT)
    assert told.headers["X-Antiphon-Ignored"] == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="tiny", prompt="A")


@pytest.mark.spec("S-DEP-035a")
def test_the_type_comes_from_the_environment(client: openai.OpenAI, model: Path) -> None:
    """The checkpoint's type would give the very same log probability as transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([PROMPT_IDS])).logits[0, -1]
    exact = float(logits.log_softmax(-1).max())
    answer = client.completions.create(model=str(model), prompt=PROMPT_IDS, max_tokens=1, temperature=0)
    told: dict[str, Any] = answer.to_dict()
    assert 1e-4 < abs(told["cum_log_probs"] - exact) < 0.2


@pytest.mark.spec("S-DIS-060:plain")
def test_a_chat_request_names_the_model_by_the_path_it_was_launched_with(client: openai.OpenAI, model: Path) -> None:
    more = {"top_k": -1, "ignore_eos": False}
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": str(model), "messages": messages, "max_tokens": 100, "top_p": 1, "temperature": 0, "stream": False}
    answer = client.chat.completions.create(**body, extra_body=more)  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert answer.model == model.name
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 100


@pytest.mark.spec("S-SRV-013", "S-API-006", "S-API-080", "S-DEP-038")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_carries_any_one_of_the_keys(served: Served, path: str) -> None:
    asked = {"messages": [{"role": "user", "content": "A"}]} if "chat" in path else {"prompt": "A"}
    body = {**asked, "max_tokens": 1}
    for key in ("first-key", "second-key"):
        assert fetch(served, "POST", path, body, Authorization=f"Bearer {key}").status == 200
    wrong = [{"Authorization": f"Bearer {key}"} for key in ("third-key", "first-key,second-key", "", ",")]
    for headers in ({}, {"Authorization": "first-key"}, *wrong):
        answer = fetch(served, "POST", path, body, **headers)
        assert answer.status == 401
        assert answer.json["error"]["code"] == "invalid_api_key"
        assert "first-key" not in answer.json["error"]["message"]
    assert "first-key" not in served.output


@pytest.mark.spec("S-DEP-043")
def test_the_terminal_client_needs_a_key_too(served: Served) -> None:
    argv = [sys.executable, "-m", "antiphon", "chat", "--server", served.url, "--max-tokens=4", "--token"]
    said, refused = (
        subprocess.run([*argv, key], cwd=ROOT, input=b"Hello\n", capture_output=True, check=False, timeout=60)
        for key in ("second-key", "third-key")
    )
    assert said.returncode == 0, said.stderr
    assert refused.returncode == 1
    assert b"[invalid_api_key]" in refused.stderr


@pytest.mark.spec("S-SRV-010", "S-SRV-011")
async def test_it_listens_on_the_address_and_port_it_was_given(served: Served) -> None:
    assert (GatewaySettings().host, GatewaySettings().port) == ("0.0.0.0", 8000)
    assert (await get("127.0.0.1", served.port, "/health")).status == 200
    with pytest.raises(OSError, match=str(served.port)):
        await asyncio.open_connection("127.0.0.2", served.port)


@pytest.mark.spec("S-DEP-036c")
async def test_the_share_of_memory_comes_from_the_environment(served: Served, model: Path) -> None:
    """As many blocks as an engine with the same settings makes by itself, and fewer than with the default share."""
    given = {"dtype": "bfloat16", "max_model_len": CONTEXT, "max_num_seqs": 2, "kv_cache_memory_gb": CACHE_GB}
    blocks: list[int] = []
    for share in (0.5, 0.9):
        worker = load_worker(EngineSettings(model=str(model), gpu_memory_utilization=share, **given))
        blocks.append(worker.facts().num_blocks)
        worker.close()
    page = (await get("127.0.0.1", served.port, "/metrics", token="second-key")).body.decode()
    [told] = re.findall(r'^vllm:cache_config_info{.*num_gpu_blocks="(\d+)"', page, re.MULTILINE)
    assert int(told) == blocks[0] < blocks[1]


@pytest.mark.spec("S-SRV-050")
async def test_no_more_sequences_run_at_once_than_were_allowed(served: Served, model: Path) -> None:
    async with openai.AsyncOpenAI(base_url=served.url, api_key="second-key", max_retries=0, timeout=60) as client:
        body = {"model": str(model), "prompt": "A", "max_tokens": 100, "extra_body": {"ignore_eos": True}}
        running: list[float] = []
        # Eight completions can end between two reports of the engine: more are sent until a report shows a full batch.
        while 2 not in running:
            requests = [asyncio.create_task(client.completions.create(**body)) for _ in range(8)]
            while not all(request.done() for request in requests):
                page = (await get("127.0.0.1", served.port, "/metrics", token="second-key")).body.decode()
                running += map(float, re.findall(r"^vllm:num_requests_running{.*} (\S+)", page, re.MULTILINE))
            assert {(await request).choices[0].finish_reason for request in requests} == {"length"}
    assert max(running) == 2


@pytest.mark.spec("S-SRV-106", "S-SRV-011", "S-DEP-036c")
@pytest.mark.parametrize(
    ("flags", "environ", "named"),
    [
        (["--gpu-memory-utilization=1.5"], {}, "--gpu-memory-utilization: 1.5"),
        (["--gpu_memory_utilization=0"], {}, "--gpu-memory-utilization: 0"),
        ([], {"GPU_MEMORY_UTILIZATION": "-0.1"}, "GPU_MEMORY_UTILIZATION: -0.1"),
        ([], {"GPU_MEMORY_UTILIZATION": "nan"}, "GPU_MEMORY_UTILIZATION: nan"),
        (["--port=65536"], {}, "--port: 65536"),
        (["--port=-1"], {}, "--port: -1"),
        (['--hf-overrides={"rope_theta": 5'], {}, '--hf-overrides: {"rope_theta": 5 is not a JSON object'),
        (["--hf-overrides=[5]"], {}, "--hf-overrides: [5] is not a JSON object"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name_before_anything_starts(
    flags: list[str],
    environ: dict[str, str],
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", *flags]) == 78
    assert named in capsys.readouterr().err


@pytest.mark.spec("S-SRV-056", "S-SRV-102")
def test_lookahead_without_its_block_manager_ends_the_direct_entry_point_before_anything_starts(model: Path) -> None:
    argv = [sys.executable, "-m", "antiphon.entrypoints.openai.api_server", f"--model={model}", "--use-lookahead"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 78
    assert (done.stdout, done.stderr) == ("", "antiphon: --use-lookahead needs --use-v2-block-manager: add it\n")
