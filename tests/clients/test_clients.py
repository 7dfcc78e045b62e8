"""Other people's clients make their calls against the real system, which gives what each call expects.

Their packages are in an environment of their own (`make client-test` makes it), since they are many and follow other
versions than the product's own tests. A Python client runs its checks (`checks`), one for each of its calls.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.clients import results
from tests.clients.checks import ANSWER, MODEL
from tests.clients.deployment import KEY, flags
from tests.system.served import ROOT, Served, until_the_end

pytestmark = pytest.mark.system
HERE = Path(__file__).parent
DOCUMENTED = (ROOT / "docs" / "reference" / "apis.md").read_text()
if "ANTIPHON_CLIENTS" not in os.environ:
    pytest.skip("run by `make client-test`, which installs the clients", allow_module_level=True)


class Client(NamedTuple):
    """Name, package and API of a client, and where its calls are: modules beside this one, or a script."""

    name: str
    package: str
    api: str
    where: tuple[str, ...]


PYTHON = (
    Client(
        "OpenAI for Python",
        "openai",
        "OpenAI",
        tuple(f"sdks.openai_{one}" for one in ("chat", "client", "responses", "kept")),
    ),
    Client("Anthropic for Python", "anthropic", "Anthropic", ("sdks.anthropic_messages",)),
    Client("Ollama for Python", "ollama", "Ollama", ("sdks.ollama_calls",)),
    Client("LiteLLM", "litellm", "OpenAI, Anthropic, Ollama, vLLM", ("frameworks.litellm_calls",)),
    Client("LangChain", "langchain-core", "OpenAI, Anthropic, Ollama", ("frameworks.langchain_calls",)),
    Client("LlamaIndex", "llama-index-core", "OpenAI", ("frameworks.llama_index_calls",)),
    Client("smolagents", "smolagents", "OpenAI, chat", ("frameworks.smolagents_calls",)),
    Client("DSPy", "dspy", "OpenAI", ("frameworks.dspy_calls",)),
    Client("Haystack", "haystack-ai", "OpenAI", ("frameworks.haystack_calls",)),
    Client("OpenAI Agents SDK", "openai-agents", "OpenAI", ("frameworks.openai_agents_calls",)),
    Client("Instructor", "instructor", "OpenAI, Anthropic", ("frameworks.instructor_calls",)),
    Client("Pydantic AI", "pydantic-ai-slim", "OpenAI", ("frameworks.pydantic_ai_calls",)),
)
NODE = Client("OpenAI for Node", "openai", "OpenAI", ("openai_node.mjs",))
VERCEL = Client("Vercel AI SDK", "ai", "OpenAI, chat", ("vercel_ai.mjs",))
Tell = Callable[[str, object], None]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with until_the_end(Served("--gateways=2", *flags(tmp_path_factory.mktemp("deployment")))) as started:
        yield started


def tell(record: Tell, client: Client, version: str, **facts: Any) -> None:
    record("client", {"client": client.name, "version": version, "api": client.api, "scenario": "calls of each kind"})
    record("facts", facts)


def printed(command: list[str], **variables: str) -> dict[str, Any]:
    """What a client's program prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("client", PYTHON, ids=lambda client: client.name)
def test_each_call_of_a_client_does_what_it_should(client: Client, served: Served, record_property: Tell) -> None:
    program = str(results.folder() / "venv" / "bin" / "python")
    outcomes = printed(
        [program, "-m", "tests.clients.checks", *(f"tests.clients.{one}" for one in client.where)],
        ANTIPHON_URL=served.url,
        ANTIPHON_KEY=KEY,
        LITELLM_LOCAL_MODEL_COST_MAP="True",
        HAYSTACK_TELEMETRY_ENABLED="False",
    )
    failed = {name: one["failed"] for name, one in outcomes.items() if "failed" in one}
    answered = {name: one["answered"] for name, one in outcomes.items() if "answered" in one}
    undocumented = {name: words for name, words in answered.items() if words not in DOCUMENTED}
    tell(
        record_property,
        client,
        results.pip_version(client.package),
        calls_passed=len(outcomes) - len(failed) - len(answered),
        calls_answered=len(answered),
        calls_failed=tuple(failed),
    )
    assert not failed
    assert not undocumented


def run_script(client: Client, served: Served, record: Tell) -> dict[str, Any]:
    """What a client in JavaScript got."""
    tell(record, client, results.npm_version(client.package))
    [script] = client.where
    # A module finds its packages beside itself.
    where = shutil.copy(HERE / script, results.folder() / script)
    return printed([shutil.which("node") or "node", where, served.url, MODEL])


def assert_chat(found: dict[str, Any]) -> None:
    assert (found["whole"], found["streamed"]) == (ANSWER, ANSWER)
    assert found["usage"] > 5
    assert (found["call"], found["arguments"]) == ("get_weather", ["city"])
    assert (found["parsed"], found["streamed_call"]) == (True, "get_weather")


def test_openais_client_for_node(served: Served, record_property: Tell) -> None:
    found = run_script(NODE, served, record_property)
    assert_chat(found)
    assert (found["response"], found["response_streamed"]) == (ANSWER, ANSWER)
    assert found["last_event"] == "response.completed"


def test_the_vercel_ai_sdk(served: Served, record_property: Tell) -> None:
    found = run_script(VERCEL, served, record_property)
    assert_chat(found)
    assert found["streamed_usage"] > 5
