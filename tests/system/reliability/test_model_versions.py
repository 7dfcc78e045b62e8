"""Versions of a model that are swapped while streams run: real processes, the command line as a user types it."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from antiphon import cli
from tests.models import make_model
from tests.system.served import Served, fetch, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.timeout(300)]
STREAMS, SWAPS, TOKENS = 8, 2, 100
ASK = {"model": "tiny", "prompt": "Once", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Directories of versions: two sets of weights, whose texts differ, twice each."""
    return [make_model(tmp_path_factory.mktemp(f"weights{seed}"), seed=seed) for seed in (1, 2, 1, 2)]


@pytest.fixture(scope="module")
def served(directories: list[Path]) -> Iterator[Served]:
    """The first version; former versions stay for longer than a busy machine takes to ask for one."""
    flags = ("--served-model-name=tiny", "--keep-former-version=15", "--threads=1", "--record-requests=1000")
    with until_the_end(Served(f"--model={directories[0]}", *flags)) as started:
        yield started


@pytest.fixture(scope="module")
def texts(served: Served, directories: list[Path]) -> dict[str, str]:
    """The text of each version, by its directory. Leaves the second version active."""
    first = text(served)
    assert models(served, "set", f"tiny={directories[1]}") == 0
    second = text(served)
    assert first != second
    return {str(directory): (first, second)[number % 2] for number, directory in enumerate(directories)}


def models(served: Served, *words: str) -> int:
    return cli.main(["models", *words, "--server", served.url])


def text(served: Served) -> str:
    answer = fetch(served, "POST", "/v1/completions", ASK)
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["text"]


def test_rollback_is_at_once_while_the_former_version_runs(
    served: Served, texts: dict[str, str], directories: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert text(served) == texts[str(directories[1])]
    running = served.pids()
    assert models(served, "rollback", "tiny") == 0
    assert text(served) == texts[str(directories[0])]
    assert served.pids() == running, "no engine had to be started"
    assert models(served, "rollback", "tiny") == 0
    [card] = fetch(served, "GET", "/v1/models").json["data"]
    assert (card["id"], card["root"]) == ("tiny", str(directories[1]))
    capsys.readouterr()
    assert models(served, "list") == 0
    listed = capsys.readouterr().out
    assert f"active    {directories[1]}" in listed
    assert f"ready     {directories[0]}" in listed
    assert fetch(served, "POST", "/v1/completions", {**ASK, "model": "tiny@2"}).status == 404


async def test_streams_are_wholly_from_one_version_while_versions_are_swapped(
    served: Served, texts: dict[str, str], directories: list[Path]
) -> None:
    over, found = asyncio.Event(), list[str]()

    async def streams(client: openai.AsyncOpenAI) -> None:
        body = {name: value for name, value in ASK.items() if name != "ignore_eos"}
        while not over.is_set():
            pieces = [
                chunk.choices[0].text
                async for chunk in await client.completions.create(**body, stream=True, extra_body={"ignore_eos": True})
            ]
            found.append("".join(pieces))

    async with openai.AsyncOpenAI(base_url=served.url, api_key="EMPTY", max_retries=0, timeout=90) as client:
        running = [asyncio.create_task(streams(client)) for _ in range(STREAMS)]
        for number, directory in zip(range(SWAPS), itertools.cycle(directories[2:] + directories[:2]), strict=False):
            assert await asyncio.to_thread(models, served, "set", f"tiny={directory}") == 0, number
            assert await asyncio.to_thread(text, served) == texts[str(directory)]
        over.set()
        await asyncio.gather(*running)
    assert set(found) == set(texts.values())
    assert len(found) >= STREAMS


def test_a_version_that_cannot_start_leaves_the_old_one_and_says_why(
    served: Served, texts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = text(served)
    assert before in texts.values()
    assert models(served, "set", f"tiny={tmp_path / 'nowhere'}") == 1
    assert "could not start, and tiny is served as before: --model:" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    assert models(served, "set", f"tiny={tmp_path}") == 1
    assert "could not start, and tiny is served as before" in capsys.readouterr().err
    assert text(served) == before
    assert models(served, "set", f"other={tmp_path}") == 4
    assert "No model is called 'other'. Models here: 'tiny'." in capsys.readouterr().err


def test_copies_of_requests_on_another_version_are_compared_and_never_shown(
    served: Served, texts: dict[str, str], directories: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def copies() -> Any:
        [model] = fetch(served, "GET", "/admin/models").json["data"]
        return model["versions"][-1]["copies"] or {"equal": 0, "different": 0}

    before = text(served)
    same, other = ([one for one in map(str, directories) if (texts[one] == before) == equal] for equal in (True, False))
    [card] = fetch(served, "GET", "/v1/models").json["data"]
    for directory, result in ((next(one for one in same if one != card["root"]), "equal"), (other[0], "different")):
        assert models(served, "shadow", f"tiny={directory}", "--share", "1") == 0
        assert [text(served) for _ in range(3)] == [before] * 3
        sampled = {**ASK, "temperature": 1.0, "n": 2, "messages": None}
        sampled = {name: value for name, value in sampled.items() if value is not None}
        assert fetch(served, "POST", "/v1/completions", sampled).status == 200
        wait_until(lambda: copies()[result] == 4, 60, lambda: str(copies()))  # noqa: B023
        assert fetch(served, "GET", "/v1/models").json["data"][0]["root"] == card["root"]
        capsys.readouterr()
        assert models(served, "shadow", "tiny", "--off") == 0
        assert f"4 {result}" in capsys.readouterr().out
    assert 'result="different",version="' in fetch(served, "GET", "/metrics").body.decode()


def test_versions_without_use_end(served: Served, texts: dict[str, str]) -> None:
    def running() -> set[str]:
        return {name for name in served.pids() if "engine" in name}

    wait_until(lambda: len(running()) == 1, 60, lambda: f"{running()}\n{served.output}")
    assert text(served) in texts.values()
    assert models(served, "rollback", "tiny") == 1
