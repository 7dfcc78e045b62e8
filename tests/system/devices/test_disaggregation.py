"""Prompts on prefill engines, the rest on decode engines: real processes, and what happens when they die."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.adapters import make_adapter, make_prompt_adapter, merge, prompted_reference
from tests.conftest import NatsServer
from tests.models import greedy_reference
from tests.support.slow import slow_but
from tests.system.served import ROOT, Served, fetch, is_too_busy, serve_tiny, until_the_end, wait_until

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
    wait_until(lambda: metric(served, name, engine) == value, 60, lambda: f"{metric(served, name, engine)} != {value}")


def body(number: int, **fields: Any) -> dict[str, Any]:
    base = {"model": "tiny", "prompt": prompt(number), "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    return {**base, **fields}


async def stream(client: openai.AsyncOpenAI, number: int, **fields: Any) -> AsyncIterator[str]:
    merged = body(number, **fields)
    extra = {name: merged.pop(name) for name in ("ignore_eos", "cache_salt") if name in merged}
    chunks = await client.completions.create(**merged, stream=True, extra_body=extra)
    async for chunk in chunks:
        yield chunk.choices[0].text


async def whole(client: openai.AsyncOpenAI, number: int, **fields: Any) -> str:
    return "".join([text async for text in stream(client, number, **fields)])


async def all_streams(served: Served, numbers: range, **fields: Any) -> list[str]:
    async with openai.AsyncOpenAI(base_url=served.url, api_key="EMPTY", max_retries=0, timeout=90) as client:
        return await asyncio.gather(*(whole(client, number, **fields) for number in numbers))


def mixed(served: Served, **fields: Any) -> list[str]:
    """Greedy and seeded streams, all at the same time."""

    async def ask() -> list[str]:
        half = NUM_STREAMS // 2
        greedy = all_streams(served, range(half), **fields)
        seeded = all_streams(served, range(half, 2 * half), temperature=0.9, seed=11, **fields)
        return [*(found := await asyncio.gather(greedy, seeded))[0], *found[1]]

    return asyncio.run(ask())


def incarnations(served: Served) -> dict[str, str]:
    """The instance ids of the engines that are ready, by their names."""
    found = fetch(served, "GET", "/admin/topology").json["members"]
    return {one["id"]: one["instance_id"] for one in found if one["service"] == "engine" and one["state"] == "ready"}


@contextlib.contextmanager
def whole_again(served: Served) -> Iterator[None]:
    """Waits at the end for the engines that were killed meanwhile: tests share the system."""
    before, pids = incarnations(served), served.pids()
    yield

    def again() -> bool:
        now, running = incarnations(served), served.pids()
        killed = {name for name in before if running.get(name) != pids[name]}
        return now.keys() == before.keys() and all(now[name] != before[name] for name in killed)

    wait_until(again, 60, lambda: served.output)


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> dict[str, str]:
    """No test finds blocks of another one in a cache: every prompt is computed and handed over again."""
    return {"cache_salt": request.node.name}


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[Served]:
    """A server that is not separated."""
    with until_the_end(serve_tiny(model, *FLAGS)) as served:
        yield served


@pytest.fixture(scope="module")
def right(alone: Served) -> list[str]:
    """What a server that is not separated answers."""
    return mixed(alone)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A LoRA adapter and a prompt adapter."""
    folder = tmp_path_factory.mktemp("adapters")
    return make_adapter(folder / "lora", model), make_prompt_adapter(folder / "soft", model, num_tokens=7)


@pytest.fixture(scope="module")
def pair(model: Path, adapters: tuple[Path, Path]) -> Iterator[Served]:
    """One engine of each role."""
    named = (f"--lora-modules=sql={adapters[0]}", f"--prompt-adapters=soft={adapters[1]}")
    with until_the_end(serve_tiny(model, *FLAGS, "--prefill=1", "--decode=1", *named)) as served:
        yield served


@pytest.fixture(scope="module")
def four(model: Path) -> Iterator[Served]:
    """Two engines of each role."""
    with until_the_end(serve_tiny(model, *FLAGS, "--prefill=2", "--decode=2")) as served:
        yield served


@pytest.fixture(
    params=[
        pytest.param((prefill, decode), id=f"{prefill}P{decode}D", marks=marks)
        for prefill, decode, marks in ((1, 1, pytest.mark.slow), (2, 1, pytest.mark.slow), (1, 2, ()), (2, 2, ()))
    ]
)
def separated(request: pytest.FixtureRequest, model: Path) -> Iterator[tuple[Served, int, int]]:
    num_prefill, num_decode = request.param
    if num_prefill == num_decode == 2:
        yield request.getfixturevalue("four"), num_prefill, num_decode
        return
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

    def counted(name: str, role: str, count: int) -> list[float]:
        return [metric(served, f"antiphon:engine_{name}_total", f"{role}-{number + 1}") for number in range(count)]

    def generated() -> float:
        return sum(counted("generation_tokens", "prefill", num_prefill))

    def loaded() -> float:
        return sum(counted("kv_loaded_tokens", "decode", num_decode))

    def saved() -> float:
        return sum(counted("kv_saved_tokens", "prefill", num_prefill))

    def counts_are_right() -> bool:
        """A prefill engine computes prompts, with one token after each, and a decode engine one token of each prompt.

        On a machine that is too busy to hear an engine, some of them are computed again.
        """
        counts = generated() - NUM_STREAMS, loaded() - (saved() - NUM_STREAMS)
        return counts == (0, 0) or is_too_busy(served)

    # The counters come with heartbeats.
    wait_until(counts_are_right, 60, lambda: f"{generated()}, {loaded()} of {saved()}")
    assert all(counted("kv_saved_tokens", "prefill", num_prefill))
    assert all(counted("kv_loaded_tokens", "decode", num_decode))
    assert is_too_busy(served) or not any(counted("kv_failed_loads", "decode", num_decode))
    settled(served, "vllm:num_requests_running", "decode-1", 0)


@pytest.mark.spec("S-DIS-001", "S-DIS-002", "S-DIS-005:cpu")
def test_the_prefill_engine_computes_the_prompt_and_the_decode_engine_goes_on(pair: Served, right: list[str]) -> None:
    """The first test of this system, whose counters are 0."""
    answer = fetch(pair, "POST", "/v1/completions", body(0)).json
    assert answer["choices"][0]["text"] == right[0]
    num_tokens = answer["usage"]["prompt_tokens"]
    settled(pair, "antiphon:engine_kv_saved_tokens_total", "prefill-1", num_tokens)
    settled(pair, "antiphon:engine_kv_loaded_tokens_total", "decode-1", num_tokens - 1)
    settled(pair, "antiphon:engine_generation_tokens_total", "prefill-1", 1)
    settled(pair, "antiphon:engine_generation_tokens_total", "decode-1", 40)
    settled(pair, "antiphon:engine_cached_tokens_total", "decode-1", 0)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.model
def test_prompts_with_adapters_are_computed_by_the_prefill_engine(
    model: Path, adapters: tuple[Path, Path], pair: Served, salt: dict[str, str], tmp_path: Path
) -> None:
    lora, soft = adapters
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(prompt(0)).ids
    merged = merge(tmp_path / "merged", model, lora)
    expected = {
        "tiny": greedy_reference(model, ids, 12),
        "sql": greedy_reference(merged, ids, 12),
        "soft": prompted_reference(model, soft, ids, 12),
    }
    assert len(set(map(tuple, expected.values()))) == 3
    num_loaded, num_failed = metric(pair, "antiphon:engine_kv_loaded_tokens_total", "decode-1"), num_failed_loads(pair)
    for name, tokens in expected.items():
        given = body(0, model=name, max_tokens=12, return_token_ids=True, **salt)
        answer = fetch(pair, "POST", "/v1/completions", given)
        assert answer.status == 200, answer.body
        assert answer.json["choices"][0]["token_ids"] == tokens
        num_loaded += len(ids) - 1 + (7 if name == "soft" else 0)
        settled(pair, "antiphon:engine_kv_loaded_tokens_total", "decode-1", num_loaded)
    assert num_failed_loads(pair) == num_failed


def test_choices_beams_and_log_probabilities_of_prompts_work_too(
    alone: Served, pair: Served, salt: dict[str, str]
) -> None:
    requests = [
        body(1, n=3, temperature=0.8, seed=4, max_tokens=8),
        body(2, use_beam_search=True, best_of=2, n=2, max_tokens=8),
        body(3, prompt_logprobs=1, max_tokens=4),
        body(4, prompt="short", max_tokens=4),
        body(5, logprobs=2, max_tokens=4),
    ]

    def choices(served: Served) -> list[Any]:
        return [fetch(served, "POST", "/v1/completions", request | salt).json["choices"] for request in requests]

    assert choices(pair) == choices(alone)


def kill(served: Served, name: str) -> None:
    os.kill(served.pids()[name], signal.SIGKILL)


@pytest.mark.parametrize("victim", ["prefill-1", "decode-1"])
@pytest.mark.parametrize(
    "delay_s", [pytest.param(0.0, marks=pytest.mark.slow), 0.15, pytest.param(0.5, marks=pytest.mark.slow)]
)
def test_a_killed_engine_loses_no_stream(
    victim: str, delay_s: float, four: Served, right: list[str], salt: dict[str, str]
) -> None:
    async def ask() -> list[str]:
        half = NUM_STREAMS // 2
        greedy = asyncio.create_task(all_streams(four, range(half), **salt))
        seeded = asyncio.create_task(all_streams(four, range(half, 2 * half), temperature=0.9, seed=11, **salt))
        await asyncio.sleep(delay_s)
        kill(four, victim)
        return [*await greedy, *await seeded]

    with whole_again(four):
        told = len(four.lines)
        assert asyncio.run(ask()) == right
    assert victim in "\n".join(four.lines[told:])


@pytest.fixture(scope="module")
def mortal(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """One engine of each role, which die when a file in the directory says so (`mortal_engine`)."""
    orders = tmp_path_factory.mktemp("orders")
    started = Served(
        f"--model={model}", "--served-model-name=tiny", *FLAGS, "--prefill=1", "--decode=1",
        # A long prompt takes several steps, so that an engine can die in the middle of it.
        "--max-num-batched-tokens=64",
        environ={"MORTAL_DIRECTORY": str(orders)},
        command=("tests.system.mortal_launcher", "serve"),
    )  # fmt: skip
    with until_the_end(started) as served:
        yield served, orders


@pytest.mark.parametrize(
    "orders",
    slow_but(
        [{"decode-1": "token 0"}, {"prefill-1": "block 9", "decode-1": "token 20"}],
        [
            {"prefill-1": "prompt 7"},
            {"prefill-1": "block 0"},
            {"prefill-1": "block 9"},
            {"decode-1": "token 0"},
            {"decode-1": "token 20"},
            {"prefill-1": "block 9", "decode-1": "token 20"},
        ],
    ),
    ids=lambda orders: ", ".join(f"{name} at {order}" for name, order in orders.items()),
)
def test_the_only_engine_of_a_role_dies_under_streams(
    orders: dict[str, str], mortal: tuple[Served, Path], right: list[str], salt: dict[str, str]
) -> None:
    """The point of the kill is exact: among seven steps of prompts no 16 long prompts are computed, and after 20 steps
    that sample no stream of 40 tokens has ended.
    """
    served, directory = mortal
    former = incarnations(served)
    with whole_again(served):
        for name, order in orders.items():
            (directory / f"{name}.new").write_text(order)
            (directory / f"{name}.new").rename(directory / name)
        assert mixed(served, **salt) == right
        assert not list(directory.iterdir()), "an engine has not reached the point at which it was to die"
    assert all(incarnations(served)[name] != former[name] for name in orders)
    # The engine that the launcher has started in its place does its part.
    loaded = metric(served, "antiphon:engine_kv_loaded_tokens_total", "decode-1")
    assert mixed(served, cache_salt=f"{salt['cache_salt']} again") == right
    wait_until(lambda: metric(served, "antiphon:engine_kv_loaded_tokens_total", "decode-1") > loaded, 60)


def test_a_frozen_prefill_engine_costs_a_second(pair: Served, right: list[str], salt: dict[str, str]) -> None:
    frozen = pair.pids()["prefill-1"]

    async def ask() -> list[str]:
        streams = asyncio.create_task(all_streams(pair, range(NUM_STREAMS // 2), **salt))
        await asyncio.sleep(0.1)
        os.kill(frozen, signal.SIGSTOP)
        return await streams

    with whole_again(pair):
        try:
            assert asyncio.run(ask()) == right[: NUM_STREAMS // 2]
        finally:
            os.kill(frozen, signal.SIGCONT)


def test_without_the_other_role_the_engines_that_are_left_serve(
    pair: Served, right: list[str], salt: dict[str, str]
) -> None:
    """The launcher starts a killed engine again; until then the other one does everything."""
    with whole_again(pair):
        for victim in ("prefill-1", "decode-1"):
            kill(pair, victim)
            fresh = {"cache_salt": salt["cache_salt"] + victim}
            assert asyncio.run(all_streams(pair, range(NUM_STREAMS // 2), **fresh)) == right[: NUM_STREAMS // 2]


@pytest.mark.spec("S-DIS-001", "S-DIS-002")
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--prefill=1",), "--decode: --prefill needs it too"),
        (("--decode=1",), "--prefill: --decode needs it too"),
        (("--prefill=1", "--decode=1", "--engines=2"), "leave out --engines"),
        (("--prefill=1", "--decode=1", "--swap-space=0"), "--swap-space: a decode engine receives KV"),
        (
            ("--kv-host=127.0.0.1",),
            "--kv-host and --kv-bind are for engines with --role prefill or --kv-replicate peer",
        ),
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


@pytest.fixture(scope="module")
def decoding(nats_server: NatsServer, model: Path) -> Iterator[tuple[Served, tuple[str, ...]]]:
    """A system without prefill engines, and the flags by which one joins it."""
    bus = (f"--nats={nats_server.url}", f"--nats-credentials={nats_server.credentials}")
    bus += (f"--namespace=test-{os.getpid()}-decoding",)
    with until_the_end(serve_tiny(model, *FLAGS, *bus, "--role=decode")) as served:
        yield served, bus


@pytest.mark.parametrize(
    ("fault", "first"),
    slow_but(
        [("damage", 5), ("silence", 3), ("die", 0)],
        [("damage", 0), ("damage", 5), ("cut", 3), ("silence", 3), ("die", 0), ("die", 5)],
    ),
    ids=lambda value: str(value),
)
def test_a_transfer_that_goes_wrong_costs_time_and_no_token(
    fault: str,
    first: int,
    decoding: tuple[Served, tuple[str, ...]],
    model: Path,
    right: list[str],
    salt: dict[str, str],
    tmp_path: Path,
) -> None:
    """The prefill engine belongs to another launcher, as on another machine, and damages what it sends or is killed."""
    served, bus = decoding
    name, told, failed = f"elsewhere-{fault}-{first}", tmp_path / "blocks", num_failed_loads(served)
    environ = {**os.environ, "FAULT": fault, "FIRST": str(first), "FAULT_FILE": str(told)}
    engine = [sys.executable, "-m", "tests.system.faulty_engine", *bus, f"--model={model}", *FLAGS]
    engine += ["--served-model-name=tiny", "--role=prefill", f"--service-id={name}", "--kv-cache-memory-gb=0.05"]
    faulty = subprocess.Popen(engine, cwd=ROOT, env=environ)
    try:
        wait_until(lambda: name in incarnations(served), 60)
        assert mixed(served, **salt) == right
        assert int(told.read_text()) > first
        assert (faulty.poll() is None) == (fault != "die")
    finally:
        faulty.kill()
        faulty.wait()
    # The counters come with the engine's next heartbeats.
    wait_until(lambda: num_failed_loads(served) > failed, 60)
    wait_until(lambda: name not in incarnations(served), 60)
