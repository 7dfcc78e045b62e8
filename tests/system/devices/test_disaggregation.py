"""Prompts on prefill engines, the rest on decode engines: real processes, and what happens when they die."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.adapters import make_adapter, make_prompt_adapter, merge, prompted_reference
from tests.conftest import NatsServer
from tests.models import greedy_reference
from tests.system.served import ROOT, Served, fetch, serve_tiny, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats]

FLAGS = ("--dtype=float32", "--block-size=16", "--swap-space=0.02", "--max-num-seqs=16")
LONG = "The prefill engine computes a prompt once and hands it over. " * 5
NUM_STREAMS = 16


def prompt(number: int) -> str:
    return f"{number} {LONG}{number}"


def metric(served: Served, name: str, engine: str) -> float:
    """A counter of one engine, by the beginning of its id."""
    for line in fetch(served, "GET", "/metrics").body.decode().splitlines():
        if line.startswith(f"{name}{{") and f'engine="{engine}' in line:
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no {name} of {engine}")


def settled(served: Served, name: str, engine: str, value: float) -> None:
    """Waits until a counter, which comes with heartbeats, has a value."""
    wait_until(lambda: metric(served, name, engine) == value, 5, lambda: f"{metric(served, name, engine)} != {value}")


def body(number: int, **fields: Any) -> dict[str, Any]:
    base = {"model": "tiny", "prompt": prompt(number), "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    return {**base, **fields}


async def stream(client: openai.AsyncOpenAI, number: int, **fields: Any) -> AsyncIterator[str]:
    merged = body(number, **fields)
    extra = {"ignore_eos": merged.pop("ignore_eos")}
    chunks = await client.completions.create(**merged, stream=True, extra_body=extra)
    async for chunk in chunks:
        yield chunk.choices[0].text


async def whole(client: openai.AsyncOpenAI, number: int, **fields: Any) -> str:
    return "".join([text async for text in stream(client, number, **fields)])


async def all_streams(served: Served, numbers: range, **fields: Any) -> list[str]:
    async with openai.AsyncOpenAI(base_url=served.url, api_key="EMPTY", max_retries=0, timeout=90) as client:
        return await asyncio.gather(*(whole(client, number, **fields) for number in numbers))


def mixed(served: Served, first: int = 0) -> list[str]:
    """Greedy and seeded streams, all at the same time."""

    async def ask() -> list[str]:
        half = NUM_STREAMS // 2
        greedy = all_streams(served, range(first, first + half))
        seeded = all_streams(served, range(first + half, first + 2 * half), temperature=0.9, seed=11)
        return [*(found := await asyncio.gather(greedy, seeded))[0], *found[1]]

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def right(model: Path) -> list[str]:
    """What a server that is not separated answers."""
    with until_the_end(serve_tiny(model, *FLAGS)) as served:
        return mixed(served)


@pytest.fixture(params=[(1, 1), (2, 1), (1, 2), (2, 2)], ids=lambda pair: f"{pair[0]}P{pair[1]}D")
def separated(request: pytest.FixtureRequest, model: Path) -> Iterator[tuple[Served, int, int]]:
    num_prefill, num_decode = request.param
    flags = (*FLAGS, f"--prefill={num_prefill}", f"--decode={num_decode}")
    with until_the_end(serve_tiny(model, *flags)) as served:
        yield served, num_prefill, num_decode


@pytest.mark.spec("S-DIS-001", "S-DIS-002", "S-DIS-005:cpu")
def test_separated_engines_give_the_tokens_of_a_single_one(
    separated: tuple[Served, int, int], right: list[str]
) -> None:
    served, num_prefill, num_decode = separated
    names = set(served.pids())
    assert {f"prefill-{number + 1}" for number in range(num_prefill)} <= names
    assert {f"decode-{number + 1}" for number in range(num_decode)} <= names
    assert not any(name.startswith("engine") for name in names)
    assert mixed(served) == right
    time.sleep(0.5)
    saved = [metric(served, "antiphon:engine_kv_saved_tokens_total", f"prefill-{n + 1}") for n in range(num_prefill)]
    loaded = [metric(served, "antiphon:engine_kv_loaded_tokens_total", f"decode-{n + 1}") for n in range(num_decode)]
    failed = [metric(served, "antiphon:engine_kv_failed_loads_total", f"decode-{n + 1}") for n in range(num_decode)]
    generated = [
        metric(served, "antiphon:engine_generation_tokens_total", f"prefill-{n + 1}") for n in range(num_prefill)
    ]
    assert all(saved)
    assert all(loaded)
    assert not any(failed)
    assert sum(generated) == NUM_STREAMS, "a prefill engine computes prompts, with one token after each"
    assert sum(loaded) == sum(saved) - NUM_STREAMS, "a decode engine computes one token of each prompt"
    settled(served, "vllm:num_requests_running", "decode-1", 0)


@pytest.mark.spec("S-DIS-001", "S-DIS-002", "S-DIS-005:cpu")
def test_the_prefill_engine_computes_the_prompt_and_the_decode_engine_goes_on(model: Path, right: list[str]) -> None:
    with until_the_end(serve_tiny(model, *FLAGS, "--prefill=1", "--decode=1")) as served:
        answer = fetch(served, "POST", "/v1/completions", body(0)).json
        assert answer["choices"][0]["text"] == right[0]
        num_tokens = answer["usage"]["prompt_tokens"]
        settled(served, "antiphon:engine_kv_saved_tokens_total", "prefill-1", num_tokens)
        settled(served, "antiphon:engine_kv_loaded_tokens_total", "decode-1", num_tokens - 1)
        settled(served, "antiphon:engine_generation_tokens_total", "prefill-1", 1)
        settled(served, "antiphon:engine_generation_tokens_total", "decode-1", 40)
        settled(served, "antiphon:engine_cached_tokens_total", "decode-1", 0)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.model
def test_prompts_with_adapters_are_computed_by_the_prefill_engine(model: Path, tmp_path: Path) -> None:
    lora = make_adapter(tmp_path / "lora", model)
    soft = make_prompt_adapter(tmp_path / "soft", model, num_tokens=7)
    named = (f"--lora-modules=sql={lora}", f"--prompt-adapters=soft={soft}")
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(prompt(0)).ids
    merged = merge(tmp_path / "merged", model, lora)
    expected = {
        "tiny": greedy_reference(model, ids, 12),
        "sql": greedy_reference(merged, ids, 12),
        "soft": prompted_reference(model, soft, ids, 12),
    }
    assert len(set(map(tuple, expected.values()))) == 3
    num_loaded = 0
    with until_the_end(serve_tiny(model, *FLAGS, "--prefill=1", "--decode=1", *named)) as served:
        for name, tokens in expected.items():
            answer = fetch(served, "POST", "/v1/completions", body(0, model=name, max_tokens=12, return_token_ids=True))
            assert answer.status == 200, answer.body
            assert answer.json["choices"][0]["token_ids"] == tokens
            num_loaded += len(ids) - 1 + (7 if name == "soft" else 0)
            settled(served, "antiphon:engine_kv_loaded_tokens_total", "decode-1", num_loaded)
        assert not num_failed_loads(served)


def test_choices_beams_and_log_probabilities_of_prompts_work_too(model: Path) -> None:
    requests = [
        body(1, n=3, temperature=0.8, seed=4, max_tokens=8),
        body(2, use_beam_search=True, best_of=2, n=2, max_tokens=8),
        body(3, prompt_logprobs=1, max_tokens=4),
        body(4, prompt="short", max_tokens=4),
        body(5, logprobs=2, max_tokens=4),
    ]

    def choices(served: Served) -> list[Any]:
        return [fetch(served, "POST", "/v1/completions", request).json["choices"] for request in requests]

    with until_the_end(serve_tiny(model, *FLAGS)) as served:
        expected = choices(served)
    with until_the_end(serve_tiny(model, *FLAGS, "--prefill=1", "--decode=1")) as served:
        assert choices(served) == expected


def kill(served: Served, name: str) -> None:
    os.kill(served.pids()[name], signal.SIGKILL)


@pytest.mark.parametrize("victim", ["prefill-1", "decode-1"])
@pytest.mark.parametrize("delay_s", [0.0, 0.15, 0.5])
def test_a_killed_engine_loses_no_stream(victim: str, delay_s: float, model: Path, right: list[str]) -> None:
    with until_the_end(serve_tiny(model, *FLAGS, "--prefill=2", "--decode=2")) as served:

        async def ask() -> list[str]:
            half = NUM_STREAMS // 2
            greedy = asyncio.create_task(all_streams(served, range(half)))
            seeded = asyncio.create_task(all_streams(served, range(half, 2 * half), temperature=0.9, seed=11))
            await asyncio.sleep(delay_s)
            kill(served, victim)
            return [*await greedy, *await seeded]

        assert asyncio.run(ask()) == right
        assert f"{victim}" in served.output


def test_without_the_other_role_the_engines_that_are_left_serve(model: Path, right: list[str]) -> None:
    """The launcher starts a killed engine again; until then the other one does everything."""
    with until_the_end(serve_tiny(model, *FLAGS, "--prefill=1", "--decode=1")) as served:
        for victim in ("prefill-1", "decode-1"):
            kill(served, victim)
            assert asyncio.run(all_streams(served, range(NUM_STREAMS // 2))) == right[: NUM_STREAMS // 2]


def test_a_frozen_prefill_engine_costs_a_second(model: Path, right: list[str]) -> None:
    with until_the_end(serve_tiny(model, *FLAGS, "--prefill=1", "--decode=1")) as served:
        frozen = served.pids()["prefill-1"]

        async def ask() -> list[str]:
            streams = asyncio.create_task(all_streams(served, range(NUM_STREAMS // 2)))
            await asyncio.sleep(0.1)
            os.kill(frozen, signal.SIGSTOP)
            return await streams

        try:
            assert asyncio.run(ask()) == right[: NUM_STREAMS // 2]
        finally:
            os.kill(frozen, signal.SIGCONT)


@pytest.mark.spec("S-DIS-001", "S-DIS-002")
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--prefill=1",), "--decode: --prefill needs it too"),
        (("--decode=1",), "--prefill: --decode needs it too"),
        (("--prefill=1", "--decode=1", "--engines=2"), "leave out --engines"),
        (("--prefill=1", "--decode=1", "--swap-space=0"), "--swap-space: a decode engine receives KV"),
        (("--kv-host=127.0.0.1",), "--kv-host and --kv-bind are for engines with --role=prefill"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(flags: tuple[str, ...], text: str, model: Path) -> None:
    served = serve_tiny(model, *flags)
    assert served.process.wait(30) == 78
    served.stop()
    assert text in served.output


def num_failed_loads(served: Served) -> float:
    lines = fetch(served, "GET", "/metrics").body.decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if "kv_failed" in line and not line.startswith("#"))


@pytest.mark.parametrize(
    ("fault", "first"),
    [("damage", 0), ("damage", 5), ("cut", 3), ("silence", 3), ("die", 0), ("die", 5)],
    ids=lambda value: str(value),
)
def test_a_transfer_that_goes_wrong_costs_time_and_no_token(
    fault: str, first: int, nats_server: NatsServer, namespace: str, model: Path, right: list[str], tmp_path: Path
) -> None:
    """The prefill engine belongs to another launcher, as on another machine, and damages what it sends or is killed."""
    bus = (f"--nats={nats_server.url}", f"--nats-credentials={nats_server.credentials}", f"--namespace={namespace}")
    told = tmp_path / "blocks"
    environ = {**os.environ, "FAULT": fault, "FIRST": str(first), "FAULT_FILE": str(told)}
    engine = [sys.executable, "-m", "tests.system.faulty_engine", *bus, f"--model={model}", *FLAGS]
    engine += ["--served-model-name=tiny", "--role=prefill", "--service-id=elsewhere", "--kv-cache-memory-gb=0.05"]
    with until_the_end(serve_tiny(model, *FLAGS, *bus, "--role=decode")) as served:
        faulty = subprocess.Popen(engine, cwd=ROOT, env=environ)
        try:
            wait_until(lambda: 'engine="elsewhere"' in fetch(served, "GET", "/metrics").body.decode(), 60)
            assert mixed(served) == right
            assert int(told.read_text()) > first
            assert (faulty.poll() is None) == (fault != "die")
        finally:
            faulty.kill()
            faulty.wait()
        # The counters come with the engine's next heartbeats.
        wait_until(lambda: num_failed_loads(served) > 0, 10)
