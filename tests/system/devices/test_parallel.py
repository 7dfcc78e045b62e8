"""An engine of several processes: the same text as one, and replaced when any of its processes dies."""

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from antiphon import LLM, LoRARequest, PromptAdapterRequest, SamplingParams
from antiphon.cli import main
from tests.adapters import make_adapter, make_prompt_adapter, merge, prompted_reference
from tests.models import greedy_reference
from tests.support import warm
from tests.system.served import Served, alive, fetch, until_the_end, wait_until

PROMPTS = [f"Number {number}:" for number in range(16)]
NUM_TOKENS = 64
LONG_TOKENS = 400
"""More than an engine computes before a test notices that it has begun."""


@pytest.fixture(scope="module")
def expected(model: Path) -> list[str]:
    with LLM(model=str(model), dtype="float32", kv_cache_memory_gb=0.1) as llm:
        return greedy(llm)


def greedy(llm: LLM) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [output.outputs[0].text or "" for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def ranks_of(served: Served) -> list[int]:
    """Process ids of the engine's other ranks."""
    children = Path(f"/proc/{served.pids()['engine-1']}/task").glob("*/children")
    pids = [int(word) for path in children for word in path.read_text().split()]
    return [pid for pid in pids if Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0] != warm.NAME]


@pytest.mark.spec("S-OFF-006", "S-SRV-070")
@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_the_offline_api_divides_a_model_with_its_adapters(
    sizes: tuple[int, int], model: Path, expected: list[str], tmp_path: Path
) -> None:
    loras = [make_adapter(tmp_path / f"lora-{seed}", model, seed=seed) for seed in (1, 2)]
    soft = PromptAdapterRequest("soft", 1, str(make_prompt_adapter(tmp_path / "soft", model, num_tokens=7)))
    merged = [merge(tmp_path / f"merged-{path.name}", model, path) for path in loras]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    settings: dict[str, Any] = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}
    settings |= {"enable_lora": True, "max_loras": 1, "enable_prompt_adapter": True}
    settings |= {"distributed_executor_backend": "mp"} if sizes[0] > 1 else {}
    with LLM(model=str(model), dtype="float32", device="cpu", kv_cache_memory_gb=0.1, **settings) as llm:
        assert greedy(llm) == expected
        ids = llm.get_tokenizer()("Once upon a time")["input_ids"]
        # One adapter is kept: each is sent again to the other ranks when it is needed again.
        for number in (0, 1, 0):
            lora = LoRARequest(f"lora-{number}", 1, str(loras[number]))
            (found,) = llm.generate("Once upon a time", params, use_tqdm=False, lora_request=lora)
            assert found.outputs[0].token_ids == greedy_reference(merged[number], ids, 12)
        (found,) = llm.generate("Once upon a time", params, use_tqdm=False, prompt_adapter_request=soft)
        assert found.outputs[0].token_ids == prompted_reference(model, Path(soft.prompt_adapter_local_path), ids, 12)


def words_and_body(model: Path) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The flags of every server here, and its request."""
    words = ("--model", str(model), "--served-model-name=m", "--device=cpu", "--dtype=float32")
    return words, {"model": "m", "prompt": PROMPTS, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("flag", ["-tp", "-pp"])
def test_the_ready_message_means_that_the_next_request_is_answered(flag: str, model: Path) -> None:
    words, body = words_and_body(model)
    short = {**body, "prompt": "A", "max_tokens": 2}
    with until_the_end(Served(*words, flag, "2")) as served:
        found = [fetch(served, "POST", "/v1/completions", short).status for _ in range(8)]
        members = fetch(served, "GET", "/admin/topology").json["members"]
    assert found == [200] * 8
    used = {one["id"]: one["resources"] for one in members}
    assert used["engine-1"]["cpu_s"] > 0
    assert used["engine-1"]["rss_bytes"] > used["detokenizer-1"]["rss_bytes"] > 0


@pytest.mark.spec("S-SRV-070", "S-SRV-071")
def test_a_divided_model_serves_and_outlives_a_rank(model: Path, expected: list[str]) -> None:
    words, body = words_and_body(model)
    with until_the_end(Served(*words, "-tp", "2", "--pipeline-parallel-size=2")) as served:
        assert texts(served, body) == expected
        chosen = {"model": "m", "prompt": PROMPTS[0], "guided_choice": ["north", "south"], "temperature": 0}
        assert texts(served, chosen)[0] in ("north", "south")
        ranks = ranks_of(served)
        assert len(ranks) == 3
        before = served.pids()["engine-1"]
        long = {**body, "max_tokens": LONG_TOKENS}
        whole = texts(served, long)
        with ThreadPoolExecutor(1) as asking:
            asked = asking.submit(texts_with_retries, served, long)
            wait_until(lambda: is_computing(served), 60, lambda: served.output)
            os.kill(ranks[-1], signal.SIGKILL)
            # The engine that replaces this one goes on, or computes the request anew if it takes long to start.
            assert asked.result() == whole
        wait_until(lambda: served.pids().get("engine-1", before) != before, 60, lambda: served.output)
        engine, ranks = served.pids()["engine-1"], ranks_of(served)
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: not any(map(alive, ranks)), 60, lambda: "a rank outlives its engine")


@pytest.mark.spec("S-SRV-070", "S-DEP-033")
def test_a_container_divides_a_model_by_its_variable(model: Path, expected: list[str]) -> None:
    words, body = words_and_body(model)
    with until_the_end(Served(*words, environ={"TP": "2"}, command=("antiphon", "run"))) as served:
        assert len(ranks_of(served)) == 1
        assert texts(served, body) == expected


@pytest.mark.spec("S-SRV-070", "S-SRV-075")
def test_the_other_name_of_the_number_of_devices_gives_the_same_text(model: Path, expected: list[str]) -> None:
    words, body = words_and_body(model)
    with until_the_end(Served(*words, "--num-gpus", "2", "--disable-custom-all-reduce")) as served:
        assert len(ranks_of(served)) == 1
        assert texts(served, body) == expected


def texts_with_retries(served: Served, body: dict[str, object]) -> list[str]:
    """As clients do: asks again while no engine is there."""
    while (reply := fetch(served, "POST", "/v1/completions", body)).status == 503:
        time.sleep(1.0)
    assert reply.status == 200, reply.body
    return [choice["text"] for choice in reply.json["choices"]]


def is_computing(served: Served) -> bool:
    page = fetch(served, "GET", "/metrics").body.decode()
    return any(float(count) for count in re.findall(r"^vllm:num_requests_running{.*} (\S+)", page, re.MULTILINE))


def texts(served: Served, body: dict[str, object]) -> list[str]:
    reply = fetch(served, "POST", "/v1/completions", body)
    assert reply.status == 200, reply.body
    return [choice["text"] for choice in reply.json["choices"]]


@pytest.mark.spec("S-SRV-070", "S-DEP-033")
def test_a_model_that_cannot_be_divided_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TP", "3")
    assert main(["serve", str(model), "--device=cpu", "--port=0"]) == 78
    assert "--tensor-parallel-size: 3 does not divide the model's" in capfd.readouterr().err
    with pytest.raises(ValueError, match="3 does not divide the model's"):
        LLM(model=str(model), device="cpu", tensor_parallel_size=3)
