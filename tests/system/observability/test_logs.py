"""The log of a server as an operator reads it: a line for each request, a warning for a lost engine, JSON."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.served import Served, fetch, serve_tiny, until_the_end, wait_until

SECRET = "nobody-may-read-this"


class ServedAsJson(Served):
    """A server whose lines are JSON objects, the ready message included."""

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


def access_lines(served: Served) -> list[str]:
    return [line.partition(" gateway-1 ")[2] for line in served.lines if " INFO gateway-1 POST " in line]


def test_each_request_has_one_line_without_its_text(model: Path):
    with until_the_end(serve_tiny(model)) as served:
        body = {"model": "tiny", "prompt": SECRET, "max_tokens": 4, "stream": True, "ignore_eos": True}
        assert fetch(served, "POST", "/v1/completions?a=query", body, **{"X-Request-Id": "mine"}).status == 200
        assert fetch(served, "POST", "/v1/completions", {"prompt": SECRET, "max_tokens": -1}).status == 400
        for path in ("/readyz", "/metrics", "/admin/topology", "/console/main.js", "/"):
            fetch(served, "GET", path)
        wait_until(lambda: len(access_lines(served)) == 2, 60, lambda: served.output)
        first, second = (line.split() for line in access_lines(served))
        assert first[:3] == ["POST", "/v1/completions", "200"]
        facts = dict(word.split("=") for word in first[4:])
        assert facts.pop("request_id")
        assert float(facts.pop("first_token_s")) > 0
        assert int(facts.pop("prompt_tokens")) > 0
        assert facts == {
            "client_request_id": "mine", "model": "tiny", "output_tokens": "4", "engines": "engine-1",
            "finish_reasons": "length",
        }  # fmt: skip
        assert second[:3] == ["POST", "/v1/completions", "400"]
        assert second[-1] == "error=invalid_value"
    assert SECRET not in served.output
    assert "query" not in served.output
    assert "GET /" not in served.output


@pytest.fixture
def as_json(model: Path) -> Iterator[ServedAsJson]:
    served = ServedAsJson(
        f"--model={model}", "--served-model-name=tiny", "--engines=2", "--gateways=2", "--log-format=json"
    )
    with until_the_end(served):
        yield served


def test_a_killed_engine_is_told_once_and_again_when_it_is_back_all_in_json(as_json: ServedAsJson):
    assert fetch(as_json, "POST", "/v1/completions", {"model": "tiny", "prompt": "A", "max_tokens": 2}).status == 200
    os.kill(as_json.pids()["engine-1"], signal.SIGKILL)
    of_gateways = lambda: [one for one in as_json.records if one["member"].startswith("gateway-")]  # noqa: E731
    wait_until(lambda: "engine-1 is there again" in [one["message"] for one in of_gateways()], 60)
    warned = [one for one in of_gateways() if one["level"] == "WARNING" and one["message"].startswith("engine-1 ")]
    # The second gateway tells it too if the machine was so busy that it took the first one for lost.
    told_by = [one["member"] for one in warned]
    assert "gateway-1" in told_by
    assert len(told_by) == len(set(told_by))
    assert warned[0]["message"].endswith(": it had no requests")
    [line] = [one for one in as_json.records if one["logger"] == "antiphon.access"]
    assert (line["path"], line["status"], line["output_tokens"]) == ("/v1/completions", 200, 2)
    assert line["engines"][0] in ("engine-1", "engine-2")
    for one in as_json.records:
        assert {"time", "level", "member", "logger", "message"} <= one.keys()
    lost = [one["id"] for one in fetch(as_json, "GET", "/admin/topology").json["lost"]]
    assert lost.count("engine-1") == 1


def test_the_access_log_can_be_switched_off(model: Path):
    with until_the_end(serve_tiny(model, "--disable-uvicorn-access-log")) as served:
        assert fetch(served, "POST", "/v1/completions", {"model": "tiny", "prompt": "A", "max_tokens": 2}).status == 200
    assert access_lines(served) == []
