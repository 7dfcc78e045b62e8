"""Other people's clients do streamed, whole, structured, tool-calling and responses calls against the real system.

Their packages are in an environment of their own (`make client-test` makes it), since they are many and follow other
versions than the product's own tests.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.served import Served, until_the_end

pytestmark = pytest.mark.system
HERE = Path(__file__).parent
FOLDER = os.environ.get("ANTIPHON_CLIENTS", "")
if not FOLDER:
    pytest.skip("run by `make client-test`, which installs the clients", allow_module_level=True)
ANSWER = "12 + 7 = 19."


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with until_the_end(Served("--engines=2", "--gateways=2")) as started:
        yield started


def run(served: Served, script: str) -> dict[str, Any]:
    """What a client's script prints."""
    folder, where = Path(FOLDER), HERE / script
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


def test_openais_client_of_the_former_major_version(served: Served) -> None:
    found = run(served, "openai_python.py")
    assert_chat(found)
    assert found["parsed"]
    assert found["response_parsed"]
    assert found["streamed_call"] == "get_weather"
    assert "tool_calls.function.arguments.done" in found["call_events"]
    assert (found["response"], found["response_streamed"]) == (ANSWER, ANSWER)
    assert found["last_event"] == "response.completed"


def test_openais_client_for_node(served: Served) -> None:
    found = run(served, "openai_node.mjs")
    assert_chat(found)
    assert found["parsed"]
    assert found["streamed_call"] == "get_weather"
    assert (found["response"], found["response_streamed"]) == (ANSWER, ANSWER)
    assert found["last_event"] == "response.completed"


def test_anthropics_client(served: Served) -> None:
    found = run(served, "anthropic_python.py")
    assert_chat(found)
    assert found["counted"]
    assert found["stop_reason"] == "tool_use"


def test_langchains_chat_model(served: Served) -> None:
    found = run(served, "langchain_chat.py")
    assert_chat(found)
    assert found["parsed"]
    assert found["parsed_by_call"]
    assert found["batch"] == [ANSWER, ANSWER]
    assert found["response"] == ANSWER
    assert found["embedding"]


def test_litellm(served: Served) -> None:
    found = run(served, "litellm_calls.py")
    for one in (found["openai"], found["hosted_vllm"]):
        assert_chat(one)
        assert one["parsed"]
    assert found["response"] == ANSWER


def test_the_vercel_ai_sdk(served: Served) -> None:
    found = run(served, "vercel_ai.mjs")
    assert_chat(found)
    assert found["parsed"]
    assert found["streamed_call"] == "get_weather"
    assert found["streamed_usage"] > 5
