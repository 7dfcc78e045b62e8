"""Keys with limits over two gateways, the file that lists them, and usage records, as an operator sees them."""

import hashlib
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from antiphon.async_client import get
from tests.system.served import Answer, Served, fetch, serve_tiny, until_the_end, wait_until

KEYS = """
[[keys]]
name = "counted"
sha256 = "{counted}"
requests-per-minute = 10

[[keys]]
name = "flood"
key = "sk-flood"

[[keys]]
name = "other"
key = "sk-other"

[[keys]]
name = "operator"
key = "sk-operator"
scopes = ["admin"]
""".format(counted=hashlib.sha256(b"sk-counted").hexdigest())
BODY = {"prompt": [65, 66], "max_tokens": 2}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("access")
    keys = directory / "keys.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    return directory


@pytest.fixture(scope="module")
def served(model: Path, files: Path) -> Iterator[Served]:
    flags = ("--gateways=2", "--max-num-seqs=16", f"--api-keys-file={files / 'keys.toml'}")
    with until_the_end(serve_tiny(model, *flags, f"--usage-sink=file:{files / 'usage.jsonl'}")) as started:
        yield started


def ask(served: Served, key: str, **headers: str) -> Answer:
    return fetch(served, "POST", "/v1/completions", BODY, Authorization=f"Bearer {key}", **headers)


def test_a_limit_holds_for_both_gateways_together(served: Served) -> None:
    began = time.monotonic()
    answers = [ask(served, "sk-counted") for _ in range(30)]
    returned = (time.monotonic() - began) / 6.0
    passed = [answer for answer in answers if answer.status == 200]
    # The connections are spread over the gateways. Each may hold one request of its share for a second. Every six
    # seconds one of the ten comes back.
    assert 9 <= len(passed) <= 12 + returned
    assert {answer.status for answer in answers} == {200, 429}
    refused = next(answer for answer in answers if answer.status == 429)
    assert refused.json["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 8
    assert refused.headers["x-ratelimit-limit-requests"] == "10"
    assert ask(served, "sk-other").status == 200


def test_each_answer_has_a_line_in_the_file(served: Served, files: Path) -> None:
    answer = ask(served, "sk-other", **{"X-Request-Id": "mine"})
    assert (answer.status, answer.headers["x-request-id"]) == (200, "mine")

    def lines() -> list[dict]:
        found = [json.loads(line) for line in (files / "usage.jsonl").read_text().splitlines()]
        return [line for line in found if line["client_request_id"] == "mine"]

    wait_until(lambda: bool(lines()), 60)
    [line] = lines()
    assert f"cmpl-{line['request_id']}" == answer.json["id"]
    assert (line["key"], line["model"], line["outcome"]) == ("other", "tiny", "completed")
    usage = answer.json["usage"]
    assert (line["prompt_tokens"], line["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert line["gateway_id"].startswith("gateway-")


def test_each_gateway_tells_of_the_requests_of_both(served: Served) -> None:
    names = {ask(served, "sk-other").json["id"].partition("-")[2] for _ in range(12)}
    listed = fetch(served, "GET", "/v1/requests?limit=100", Authorization="Bearer sk-other").json
    assert listed["silent_gateways"] == []
    assert names <= {one["id"] for one in listed["data"]}
    created = [one["created"] for one in listed["data"]]
    assert created == sorted(created, reverse=True)
    assert {one["gateway"] for one in listed["data"] if one["id"] in names} == {"gateway-1", "gateway-2"}
    for name in names:
        path = f"/v1/requests/{name}/timeline"
        found = fetch(served, "GET", path, Authorization="Bearer sk-other")
        assert (found.status, found.json["id"]) == (200, name)
        assert fetch(served, "GET", path, Authorization="Bearer sk-counted").status == 404
        assert fetch(served, "GET", f"{path}?format=trace_events", Authorization="Bearer sk-other").status == 200


async def test_metrics_are_for_operators_and_keys_are_in_no_log(served: Served) -> None:
    for key, status in (("sk-operator", 200), ("sk-other", 403), ("sk-none", 401)):
        assert (await get("127.0.0.1", served.port, "/metrics", token=key)).status == status
    page = (await get("127.0.0.1", served.port, "/metrics", token="sk-operator")).body.decode()
    assert re.search(r'^antiphon:usage_records_dropped_total{receiver="sink"} 0', page, re.MULTILINE)
    assert "sk-" not in served.output


def test_a_key_that_floods_does_not_starve_another(served: Served) -> None:
    body = {"prompt": [70] * 20, "max_tokens": 300, "ignore_eos": True}

    def flood() -> int:
        return fetch(served, "POST", "/v1/completions", body, Authorization="Bearer sk-flood").status

    with ThreadPoolExecutor(128) as pool:
        flooding = [pool.submit(flood) for _ in range(128)]
        wait_until(lambda: sum(one.done() for one in flooding) >= 2, 60)
        for _ in range(3):
            assert ask(served, "sk-other").status == 200
        assert not all(one.done() for one in flooding), "three requests did not wait for all of the others"
        assert {one.result() for one in flooding} == {200}


def test_keys_change_without_a_restart(served: Served, files: Path) -> None:
    replacement = files / "new.toml"
    replacement.write_text(KEYS.replace("sk-other", "sk-changed"))
    replacement.chmod(0o600)
    replacement.rename(files / "keys.toml")
    # Each gateway looks at the file for itself.
    for _ in range(4):
        wait_until(lambda: ask(served, "sk-changed").status == 200 and ask(served, "sk-other").status == 401, 60)
