"""The images and docker-compose.yml for real: two of each service, the openai client, killed containers.

Needs Docker and docker-compose; run by `make container-test`, never by `make test`.
"""

import asyncio
import json
import urllib.request
from collections.abc import Iterator

import openai
import pytest

from tests.container.stack import NAME, RESTART_S, SERVICES, Stack, demo_model, load, run, started, wait_until

LONG = 2000
"""Tokens; nearly the demo model's context: a second or more."""
pytestmark = [pytest.mark.container, pytest.mark.timeout(1200)]

CONTENT = """
import importlib.util, json, os, pathlib
names = ("torch", "transformers", "fastapi", "uvicorn", "tokenizers", "jinja2", "nats", "pytest", "antiphon.cli")
present = [n for n in names if importlib.util.find_spec(n)]
services = sorted(p.name for p in pathlib.Path("antiphon/services").iterdir() if p.is_dir() and p.name != "__pycache__")
print(json.dumps({"present": present, "services": services, "uid": os.getuid()}))
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with started(demo_model(tmp_path_factory.mktemp("model"))) as made:
        yield made


def served(url: str) -> float:
    """Chat requests that one gateway has answered."""
    with urllib.request.urlopen(url.replace("/v1", "/metrics"), timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    counts = [line.rpartition(" ")[2] for line in lines if line.startswith("http_requests_total") and "chat" in line]
    return sum(map(float, counts))


def running(url: str) -> float:
    """Sequences that the engines work on, as one gateway knows from their heartbeats."""
    with urllib.request.urlopen(url.replace("/v1", "/metrics"), timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_requests_running"))


@pytest.mark.parametrize(
    ("service", "present", "absent"),
    [
        ("gateway", {"fastapi", "uvicorn", "nats"}, {"torch", "transformers", "tokenizers"}),
        ("tokenizer", {"tokenizers", "jinja2", "nats"}, {"torch", "transformers", "fastapi"}),
        ("detokenizer", {"tokenizers", "nats"}, {"torch", "transformers", "fastapi", "jinja2"}),
        ("engine", {"torch", "transformers", "nats"}, {"fastapi", "uvicorn"}),
    ],
)
def test_an_image_holds_its_service_and_nothing_of_the_others(
    stack: Stack, service: str, present: set[str], absent: set[str]
) -> None:
    image = f"antiphon-{service}"
    if service == "engine":
        # transformers brings jinja2 and tokenizers.
        absent = absent | {"pytest"}
    content = json.loads(run("docker", "run", "--rm", "--entrypoint=python", image, "-c", CONTENT))
    assert present <= set(content["present"])
    assert not (absent | {"pytest", "antiphon.cli"}) & set(content["present"])
    assert content["services"] == [service]
    assert content["uid"] != 0


@pytest.mark.spec("S-DEP-042:sdk")
def test_each_gateway_answers_the_openai_client_whole_and_streamed(stack: Stack) -> None:
    urls = stack.gateways()
    assert len(set(urls)) == 2
    answers: set[str] = set()
    for url in urls:
        with openai.OpenAI(base_url=url, api_key="EMPTY", max_retries=0, timeout=60) as client:
            assert [model.id for model in client.models.list()] == [NAME]
            ask = {"model": NAME, "messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0}
            whole = client.chat.completions.create(**ask).choices[0].message.content
            chunks = client.chat.completions.create(**ask, stream=True)
            streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert streamed == whole
            answers.add(streamed)
    assert len(answers) == 1


def test_one_port_serves_both_gateways_and_says_when_there_is_none(stack: Stack) -> None:
    with openai.OpenAI(base_url=stack.balanced(), api_key="EMPTY", max_retries=0, timeout=60) as client:
        ask = {"model": NAME, "messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}
        whole = client.chat.completions.create(**ask).choices[0].message.content
        chunks = client.chat.completions.create(**ask, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    stack.compose("stop", "-t", "30", "gateway")
    with openai.OpenAI(base_url=stack.balanced(), api_key="EMPTY", max_retries=0, timeout=60) as client:
        with pytest.raises(openai.InternalServerError, match="No gateway is running") as error:
            client.models.list()
        assert error.value.status_code == 503
    stack.compose("start", "gateway")
    stack.wait_until_healthy(RESTART_S)


async def test_a_stream_passes_the_load_balancer_piece_by_piece_and_ends_with_its_client(stack: Stack) -> None:
    gateway = stack.gateways()[0]
    async with openai.AsyncOpenAI(base_url=stack.balanced(), api_key="EMPTY", max_retries=0, timeout=60) as client:
        chunks = await client.completions.create(
            model=NAME, prompt="a", stream=True, max_tokens=LONG, extra_body={"ignore_eos": True}
        )
        await anext(chunks)
        # With a buffer on the way the first piece would come when the engine has nothing left to do.
        await asyncio.to_thread(wait_until, lambda: running(gateway) == 1, 10.0, lambda: "the first piece came last")
        await chunks.close()
    await asyncio.to_thread(wait_until, lambda: running(gateway) == 0, 30.0, lambda: "the request goes on")


async def test_a_killed_gateway_fails_no_request_that_comes_later(stack: Stack) -> None:
    victim = stack.containers("gateway")[0]
    starts = stack.starts(victim)
    await asyncio.to_thread(stack.kill, victim)
    texts = await load([stack.balanced()] * 16, 16)
    assert len(texts) == 16
    await asyncio.to_thread(wait_until, lambda: stack.starts(victim) == starts + 1, RESTART_S, stack.describe)
    await asyncio.to_thread(stack.wait_until_healthy, RESTART_S)


async def test_every_replica_takes_work(stack: Stack) -> None:
    before = stack.statuses()
    await load([stack.balanced()] * 48, 48)
    after = stack.statuses()
    assert all(served(url) for url in stack.gateways()), "a gateway got no connection from the common port"
    for service in ("tokenizer", "engine", "detokenizer"):
        assert len(after[service]) == 2
        for member, work in after[service].items():
            assert work > before[service].get(member, 0), (service, member, before, after)


@pytest.mark.parametrize("service", ["tokenizer", "detokenizer", "engine"])
async def test_a_killed_container_loses_no_request_and_comes_back(stack: Stack, service: str) -> None:
    expected = await load(stack.gateways(), 8)
    victim = stack.containers(service)[0]
    starts = stack.starts(victim)
    texts = await load(stack.gateways(), 32, during=lambda: stack.kill(victim))
    assert len(texts) == 48
    assert texts == [expected[n % 8] for n in range(48)]
    assert stack.starts(victim) == starts + 1
    stack.wait_until_healthy(RESTART_S)


def test_stopping_drains_every_container(stack: Stack) -> None:
    members = {service: stack.containers(service) for service in SERVICES}
    stack.compose("stop", "-t", "30", *SERVICES)
    for service, containers in members.items():
        codes = [run("docker", "inspect", "-f", "{{.State.ExitCode}}", c) for c in containers]
        assert codes == ["0", "0"], service
