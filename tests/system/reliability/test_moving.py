"""Work that is moved on purpose: an engine taken out of service by hand or by a signal, every process restarted."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import openai
import pytest

from tests.models import make_model
from tests.system.served import ROOT, Served, fetch, is_too_busy, serve_tiny, slowed, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.timeout(300)]
STREAMS, TOKENS = 4, 800
UNDISTURBED: list[tuple[str, str]] = []
SERVICES = ("gateway", "tokenizer", "detokenizer", "engine")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two processes of each service. The context is long and the layers are many, so that streams take seconds."""
    model = make_model(tmp_path_factory.mktemp("long"), max_position_embeddings=4096, num_hidden_layers=6)
    flags = [f"--{service}s=2" for service in SERVICES]
    with until_the_end(serve_tiny(model, "--threads=1", *flags)) as started:
        yield started


@pytest.fixture
def two(served: Served) -> Iterator[Served]:
    """The same; all of them are in service again at the end, also if the test fails."""
    yield served
    for name in ("engine-1", "engine-2"):
        fetch(served, "POST", f"/admin/engines/{name}/resume")


def command(served: Served, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "antiphon", *words, "--server", served.url]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


async def stream(client: openai.AsyncOpenAI, number: int, flowing: asyncio.Event | None = None) -> tuple[str, str]:
    """The id and the whole text of a streamed answer. `flowing` is set at its first text."""
    text, name = "", ""
    more = {"max_tokens": TOKENS, "temperature": 0.8, "seed": number, "extra_body": {"ignore_eos": True}}
    async for chunk in await client.completions.create(model="tiny", prompt=f"Once {number}", stream=True, **more):
        text, name = text + chunk.choices[0].text, chunk.id
        if flowing is not None and text:
            flowing.set()
    return name, text


def reasons(served: Served, name: str) -> list[str]:
    """Why the attempts of a request ended early. The request is recorded by one of the two gateways."""
    for _ in range(100):
        reply = fetch(served, "GET", f"/v1/requests/{name}/timeline")
        if reply.status == 200:
            return [a["reason"] for s in reply.json["sequences"] for a in s["attempts"] if a["reason"]]
    raise AssertionError(f"no gateway has recorded {name}")


async def all_ready(served: Served) -> None:
    def ready() -> bool:
        found = fetch(served, "GET", "/admin/topology").json["members"]
        up = [member["service"] for member in found if member["state"] == "ready"]
        return all(up.count(service) == 2 for service in SERVICES)

    await asyncio.to_thread(wait_until, ready, 60, lambda: served.output)


def busy_engine(served: Served) -> str:
    """An engine that computes one of the streams that run now."""
    running = fetch(served, "GET", "/v1/requests?state=running").json["data"]
    found = [request["engines"][-1] for request in running if request["engines"]]
    assert found, "the streams have ended"
    return found[0]


async def moved_streams(served: Served, move: Callable[[], object]) -> list[str]:
    """Runs streams undisturbed and then with `move` in their midst, and compares. Returns why attempts ended."""
    async with openai.AsyncOpenAI(base_url=served.url, api_key="EMPTY", max_retries=0, timeout=90) as client:
        if not UNDISTURBED:
            UNDISTURBED.extend(await asyncio.gather(*(stream(client, number) for number in range(STREAMS))))
        flowing = [asyncio.Event() for _ in range(STREAMS)]
        with slowed(*(pid for name, pid in served.pids().items() if name.startswith("engine-"))):
            again = [asyncio.create_task(stream(client, number, flowing[number])) for number in range(STREAMS)]
            await asyncio.gather(*(event.wait() for event in flowing))
            await asyncio.to_thread(move)
        found = await asyncio.gather(*again)
    assert [text for _, text in found] == [text for _, text in UNDISTURBED]
    return [reason for name, _ in found for reason in reasons(served, name)]


async def moved_on_purpose(served: Served, move: Callable[[], object], undo: Callable[[], object]) -> list[str]:
    """As `moved_streams`; begins anew if a busy machine lost the streams before they could be moved."""
    for _ in range(3):
        why = await moved_streams(served, move)
        if "moved" in why:
            break
        assert is_too_busy(served), why
        undo()
        await all_ready(served)
    return why


def were_moved(served: Served, why: list[str]) -> bool:
    """Whether streams were moved on purpose, and for no other reason."""
    return "moved" in why and (set(why) == {"moved"} or is_too_busy(served))


async def test_a_drained_engine_gives_its_streams_away_and_takes_none_until_it_is_resumed(two: Served) -> None:
    await all_ready(two)
    pids, drained = two.pids(), list[str]()

    def drain() -> None:
        drained.append(busy_engine(two))
        fetch(two, "POST", f"/admin/engines/{drained[0]}/drain")

    why = await moved_on_purpose(two, drain, lambda: fetch(two, "POST", f"/admin/engines/{drained[-1]}/resume"))
    name, other = drained[-1], "engine-1" if drained[-1] == "engine-2" else "engine-2"
    printed = command(two, "drain", name)
    assert printed.returncode == 0, printed
    assert f"{name} is out of service until `antiphon resume {name}`" in printed.stdout
    assert were_moved(two, why), why
    assert two.pids()[name] == pids[name]
    again = await moved_streams(two, lambda: None)
    assert not again or is_too_busy(two), again
    view = fetch(two, "GET", f"/admin/engines/{name}").json
    assert (view["state"], view["sequences"], view["others"]) == ("draining", 0, [other])
    last = command(two, "drain", other)
    assert last.returncode == 1
    assert "is the only engine of the model 'tiny'" in last.stderr
    assert command(two, "resume", name).stdout == f"{name} takes requests again\n"
    await all_ready(two)
    unknown = command(two, "drain", "engine-9")
    assert (unknown.returncode, "Engines that are alive: engine-1, engine-2" in unknown.stderr) == (4, True)


async def test_an_engine_that_is_told_to_end_hands_its_streams_over_without_the_wait_for_a_lease(two: Served) -> None:
    await all_ready(two)
    ended = list[tuple[str, int]]()

    def end() -> None:
        name = busy_engine(two)
        ended.append((name, two.pids()[name]))
        os.kill(ended[-1][1], signal.SIGTERM)

    def again() -> None:
        name, pid = ended[-1]
        wait_until(lambda: two.pids().get(name, pid) != pid, 60)

    why = await moved_on_purpose(two, end, again)
    assert were_moved(two, why), why
    await asyncio.to_thread(again)


async def test_a_detokenizer_that_is_told_to_end_hands_its_streams_over(two: Served) -> None:
    await all_ready(two)
    pid = two.pids()["detokenizer-1"]
    why = await moved_streams(two, lambda: os.kill(pid, signal.SIGTERM))
    # The end of a detokenizer does not move them.
    assert not why or is_too_busy(two), why
    await asyncio.to_thread(wait_until, lambda: two.pids().get("detokenizer-1", pid) != pid, 60)


async def test_each_service_is_restarted_under_load_and_no_request_fails(two: Served) -> None:
    await all_ready(two)
    over, done, failures = asyncio.Event(), 0, list[str]()
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 24, "seed": 1, "ignore_eos": True}
    expected = fetch(two, "POST", "/v1/completions", body).json["choices"][0]["text"]

    async def ask() -> None:
        nonlocal done
        while not over.is_set():
            try:
                answer = await asyncio.to_thread(fetch, two, "POST", "/v1/completions", body)
            except OSError as error:
                failures.append(repr(error))
                continue
            if answer.status != 200 or answer.json["choices"][0]["text"] != expected:
                failures.append(f"{answer.status} {json.dumps(answer.json)[:200]}")
            done += 1

    askers = [asyncio.create_task(ask()) for _ in range(4)]
    for name, pid in [(f"{service}-1", two.pids()[f"{service}-1"]) for service in SERVICES]:
        os.kill(pid, signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda: two.pids().get(name, pid) != pid, 60)  # noqa: B023
        await all_ready(two)
    over.set()
    await asyncio.gather(*askers)
    assert not failures
    assert done > 20
