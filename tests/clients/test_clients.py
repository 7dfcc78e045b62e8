"""Other people's clients do streamed, whole, structured, tool-calling and responses calls against the real system.

Their packages are in an environment of their own (`make client-test` makes it), since they are many and follow other
versions than the product's own tests.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients import results
from tests.system.served import Served, until_the_end

pytestmark = pytest.mark.system
HERE = Path(__file__).parent
if "ANTIPHON_CLIENTS" not in os.environ:
    pytest.skip("run by `make client-test`, which installs the clients", allow_module_level=True)
ANSWER = "12 + 7 = 19."
CLIENTS = {
    "openai_python.py": ("OpenAI for Python", "openai", "OpenAI"),
    "openai_node.mjs": ("OpenAI for Node", "openai", "OpenAI"),
    "anthropic_python.py": ("Anthropic for Python", "anthropic", "Anthropic"),
    "ollama_python.py": ("Ollama for Python", "ollama", "Ollama"),
    "langchain_chat.py": ("LangChain's ChatOpenAI", "langchain-openai", "OpenAI"),
    "litellm_calls.py": ("LiteLLM", "litellm", "OpenAI"),
    "vercel_ai.mjs": ("Vercel AI SDK", "ai", "OpenAI, chat"),
}
"""Name, package and API of each script's client."""
Run = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with until_the_end(Served("--engines=2", "--gateways=2")) as started:
        yield started


@pytest.fixture
def run(served: Served, record_property: Callable[[str, object], None]) -> Run:
    """Runs a client's script and returns what it prints."""

    def run_one(script: str) -> dict[str, Any]:
        client, package, api = CLIENTS[script]
        version = results.npm_version(package) if script.endswith(".mjs") else results.pip_version(package)
        named = {"client": client, "version": version, "api": api, "scenario": "calls of each kind"}
        record_property("client", named)
        return printed(served, script)

    return run_one


def printed(served: Served, script: str) -> dict[str, Any]:
    """What a client's script prints."""
    folder, where = results.folder(), HERE / script
    program = str(folder / "venv" / "bin" / "python")
    if script.endswith(".mjs"):
        program = shutil.which("node") or "node"
        # A module finds its packages beside itself.
        where = Path(shutil.copy(where, folder / script))
    command = [program, str(where), served.url, "antiphon-demo"]
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_chat(found: dict[str, Any]) -> None:
    assert (found["whole"], found["streamed"]) == (ANSWER, ANSWER)
    assert found["usage"] > 5
    assert (found["call"], found["arguments"]) == ("get_weather", ["city"])


def test_openais_client_of_the_former_major_version(run: Run) -> None:
    found = run("openai_python.py")
    assert_chat(found)
    assert found["parsed"]
    assert found["response_parsed"]
    assert found["streamed_call"] == "get_weather"
    assert "tool_calls.function.arguments.done" in found["call_events"]
    assert (found["response"], found["response_streamed"]) == (ANSWER, ANSWER)
    assert found["last_event"] == "response.completed"


def test_openais_client_for_node(run: Run) -> None:
    found = run("openai_node.mjs")
    assert_chat(found)
    assert found["parsed"]
    assert found["streamed_call"] == "get_weather"
    assert (found["response"], found["response_streamed"]) == (ANSWER, ANSWER)
    assert found["last_event"] == "response.completed"


def test_anthropics_client(run: Run) -> None:
    found = run("anthropic_python.py")
    assert_chat(found)
    assert found["counted"]
    assert found["stop_reason"] == "tool_use"


def test_ollamas_client(run: Run) -> None:
    found = run("ollama_python.py")
    assert (found["whole"], found["streamed"], found["generated"]) == (ANSWER, ANSWER, ANSWER)
    assert found["usage"] > 5
    assert found["logprobs"].startswith(ANSWER)
    assert set(found["tops"]) == {2}
    assert found["parsed"]
    assert found["with_tools"] == "stop"
    assert found["embedded"] == [found["embedded_former"]] * 2
    assert found["size"][0] == found["size"][1] > 10_000_000
    assert found["digest"]
    assert found["details"]["format"] == "safetensors"
    assert found["details"]["parameter_size"] == "5.8M"
    assert found["context"][0] == found["context"][1]
    assert "completion" in found["capabilities"]
    assert (found["pulled"], found["missing"]) == ("success", 404)


def test_langchains_chat_model(run: Run) -> None:
    found = run("langchain_chat.py")
    assert_chat(found)
    assert found["parsed"]
    assert found["parsed_by_call"]
    assert found["batch"] == [ANSWER, ANSWER]
    assert found["response"] == ANSWER
    assert found["embedding"]


def test_litellm(run: Run) -> None:
    found = run("litellm_calls.py")
    for one in (found["openai"], found["hosted_vllm"]):
        assert_chat(one)
        assert one["parsed"]
    assert found["response"] == ANSWER


def test_the_vercel_ai_sdk(run: Run) -> None:
    found = run("vercel_ai.mjs")
    assert_chat(found)
    assert found["parsed"]
    assert found["streamed_call"] == "get_weather"
    assert found["streamed_usage"] > 5
