"""`/v1/requests` as a client sees it: what it tells, and to whom. The backend is scripted: see `edge`."""

import asyncio

import pytest

from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.services.gateway.ops.timeline.recorder import Recorder
from antiphon.services.gateway.path.record import RequestFacts
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import DeviceMemory, GatewayStatus, ProcessResources
from antiphon.shared.security.api_keys import keys_of_text
from tests.integration.edge import CARD, Connection, ScriptedBackend, call, serving, text_batches
from tests.support.heartbeats import heartbeat

SECRET = "the-secret-of-the-prompt"
BODY = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 7}
CHAT = "/v1/chat/completions"
KEY_FILE = """
[[keys]]
name = "red"
key = "sk-red"

[[keys]]
name = "blue"
key = "sk-blue"

[[keys]]
name = "operator"
key = "sk-op"
scopes = ["inference", "admin"]
"""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_a_request_is_listed_while_it_runs_and_after_its_end():
    backend = ScriptedBackend(manual=True)
    async with serving(backend, recorder=Recorder(8)) as port, Connection(port) as connection:
        await connection.send("POST", CHAT, b'{"stream": true, "messages": [{"role": "user", "content": "hi"}]}')
        generation = await backend.generations.get()
        running = (await call(port, "GET", "/v1/requests?state=running")).json["data"]
        assert [(one["state"], one["model"]) for one in running] == [("running", CARD.name)]
        generation.put(*text_batches("Good ", "day"), None)
        await connection.reply()
        assert (await call(port, "GET", "/v1/requests?state=running")).json["data"] == []
        [done] = (await call(port, "GET", "/v1/requests?state=completed")).json["data"]
        assert done["id"] == running[0]["id"]
        assert (done["prompt_tokens"], done["completion_tokens"], done["finish_reasons"]) == (3, 2, ["stop"])


async def test_neither_prompts_nor_texts_are_told():
    async with serving(ScriptedBackend(), recorder=Recorder(8)) as port:
        answer = await call(port, "POST", CHAT, BODY)
        name = answer.json["id"]
        replies = [await call(port, "GET", path) for path in ("/v1/requests", f"/v1/requests/{name}/timeline")]
        for reply in replies:
            assert reply.status == 200
            assert SECRET not in reply.body.decode()
            assert "Good " not in reply.body.decode()
            assert reply.headers["cache-control"] == "no-store"
        assert replies[1].json["object"] == "request.timeline"
        assert replies[1].json["max_tokens"] == 7


async def test_search_finds_by_id_state_and_error():
    backend = ScriptedBackend()
    async with serving(backend, recorder=Recorder(8)) as port:
        await call(port, "POST", CHAT, BODY, {"x-request-id": "order-4711"})
        backend.reply = lambda request: [ServiceError("engine_failure", "It broke.")]
        await call(port, "POST", CHAT, BODY)
        for query, count in (("4711", 1), ("engine_failure", 1), ("org/toy completed", 1), ("toy", 2), ("nothing", 0)):
            found = await call(port, "GET", f"/v1/requests?q={query.replace(' ', '+')}")
            assert len(found.json["data"]) == count, query
        by_own_name = await call(port, "GET", "/v1/requests/order-4711")
        assert by_own_name.json["client_request_id"] == "order-4711"
        slowest = (await call(port, "GET", "/v1/requests?sort=slowest&limit=1")).json
        assert len(slowest["data"]) == 1
        assert slowest["has_more"]


async def test_a_key_sees_its_own_requests_and_an_administrator_those_of_all():
    keys = ApiKeys("", keys_of_text(KEY_FILE, is_json=False, source=""))
    async with serving(ScriptedBackend(), recorder=Recorder(8), keys=keys) as port:
        red = (await call(port, "POST", CHAT, BODY, bearer("sk-red"))).json["id"]
        await call(port, "POST", CHAT, BODY, bearer("sk-blue"))
        for key, path, names in (
            ("sk-red", "/v1/requests", ["red"]),
            ("sk-blue", "/v1/requests", ["blue"]),
            ("sk-op", "/v1/requests", []),
            ("sk-op", "/v1/requests?all=true", ["blue", "red"]),
        ):
            found = await call(port, "GET", path, headers=bearer(key))
            assert sorted(one["key"] for one in found.json["data"]) == names, (key, path)
        refused = await call(port, "GET", "/v1/requests?all=true", headers=bearer("sk-red"))
        assert (refused.status, refused.error["code"]) == (403, "permission_denied")
        for key, status in (("sk-red", 200), ("sk-blue", 404), ("sk-op", 200)):
            found = await call(port, "GET", f"/v1/requests/{red}/timeline", headers=bearer(key))
            assert found.status == status, key
        assert (await call(port, "GET", "/v1/requests")).status == 401
        assert (await call(port, "GET", "/admin/topology", headers=bearer("sk-red"))).status == 403
        assert (await call(port, "GET", "/admin/topology", headers=bearer("sk-op"))).status == 200


async def test_wrong_questions_get_a_reason():
    async with serving(ScriptedBackend(), recorder=Recorder(8)) as port:
        odd = await call(port, "GET", "/v1/requests/unknown/timeline?format=odd")
        assert (odd.status, odd.error["param"]) == (400, "format")
        for path in ("?state=odd", "?sort=odd", "?limit=0", "?nonsense=1", "?after=unknown"):
            reply = await call(port, "GET", f"/v1/requests{path}")
            assert reply.status == 400, path
            assert reply.error["message"]
        assert (await call(port, "GET", "/v1/requests/unknown/timeline")).status == 404
    async with serving(ScriptedBackend()) as port:
        reply = await call(port, "GET", "/v1/requests")
        assert (reply.status, "--record-requests" in reply.error["message"]) == (404, True)


async def test_a_client_that_leaves_is_recorded_as_cancelled():
    backend = ScriptedBackend(manual=True)
    async with serving(backend, recorder=Recorder(8)) as port:
        async with Connection(port) as connection:
            await connection.send("POST", CHAT, b'{"stream": true, "messages": [{"role": "user", "content": "hi"}]}')
            generation = await backend.generations.get()
        async with asyncio.timeout(60):
            await generation.stopped.wait()
            while not (await call(port, "GET", "/v1/requests?state=cancelled")).json["data"]:
                await asyncio.sleep(0.01)


async def test_the_topology_lists_every_member_with_its_load():
    beat = heartbeat(
        "gateway",
        "g-1",
        "b",
        GatewayStatus(num_requests=2, num_waiting=1),
        sequence=3,
        interval_s=0.3,
        messages_received=40,
        messages_sent=50,
        resources=ProcessResources(
            cpu_s=1.5,
            num_cores=4,
            rss_bytes=1000,
            gpus=(DeviceMemory(index=0, name="A GPU", used_bytes=3, total_bytes=8),),
        ),
    )
    async with serving(ScriptedBackend(), members=lambda: [(beat, 0.25)]) as port:
        [member] = (await call(port, "GET", "/admin/topology")).json["members"]
    assert member == {
        "service": "gateway",
        "id": "g-1",
        "instance_id": "b",
        "state": "ready",
        "heartbeat_age_s": 0.25,
        "heartbeat_interval_s": 0.3,
        "heartbeat_sequence": 3,
        "messages_received": 40,
        "messages_sent": 50,
        "resources": {
            "cpu_s": 1.5,
            "num_cores": 4,
            "rss_bytes": 1000,
            "gpus": [{"index": 0, "name": "A GPU", "used_bytes": 3, "total_bytes": 8}],
        },
        "load": {
            "num_requests": 2,
            "num_waiting": 1,
            "accepted_requests": 0,
            "ended_requests": 0,
            "num_idle_waiting": 0,
            "errors": 0,
        },
    }


def prefilled(slow_key: str = "red") -> Recorder:
    """A recorder with 20 usual requests of the key red, and one of `slow_key` that waited 7 s for an engine."""
    now = [100.0]
    recorder = Recorder(32, lambda: now[0])
    for number in range(21):
        is_slow = number == 20
        facts = RequestFacts(
            request_id=f"r{number}", model="m", key=slow_key if is_slow else "red", client_request_id=f"job-{number}"
        )
        record = recorder.begin(facts, now[0])
        record.admitted()
        record.tokenized(3)
        now[0] += 7.0 if is_slow else 0.001
        record.placed(0, 1, "engine-1", "d")
        for _ in range(2):
            now[0] += 0.2
            record.arrived(0, 1)
        record.ended("completed", "", 3, 0, 2, ("stop",))
    for record in recorder.all():
        # The usual requests ran while the slow one waited.
        record.created = 1000.0 if record.facts.request_id == "r20" else 1001.0
    return recorder


async def test_slow_requests_are_marked_counted_and_found():
    async with serving(ScriptedBackend(), recorder=prefilled()) as port:
        found = (await call(port, "GET", "/v1/requests?limit=2")).json
        assert found["num_slow"] == 1, "those on other pages count too"
        found = (await call(port, "GET", "/v1/requests?slow=true")).json
        assert [(one["id"], one["slow"]["phase"]) for one in found["data"]] == [("r20", "gateway_queue")]
        searched = (await call(port, "GET", "/v1/requests?q=job-20")).json["data"]
        assert searched[0]["slow"] == found["data"][0]["slow"], "the search does not change what is usual"
        assert (await call(port, "GET", "/v1/requests?q=job-5")).json["data"][0]["slow"] is None
        assert (await call(port, "GET", "/v1/requests?slow=perhaps")).status == 400


async def test_a_key_is_not_told_the_names_of_others_that_had_the_engines():
    keys = ApiKeys("", keys_of_text(KEY_FILE, is_json=False, source=""))
    async with serving(ScriptedBackend(), recorder=prefilled("blue"), keys=keys) as port:
        of_blue = (await call(port, "GET", "/v1/requests/job-20/timeline", headers=bearer("sk-blue"))).json["meanwhile"]
        assert (of_blue["num_requests"], of_blue["num_hidden"], of_blue["requests"]) == (20, 20, [])
        assert "red" not in str(of_blue)
        of_all = (await call(port, "GET", "/v1/requests/job-20/timeline", headers=bearer("sk-op"))).json["meanwhile"]
        assert {(one["id"], one["key"]) for one in of_all["requests"]} == {
            (f"r{number}", "red") for number in range(20)
        }


async def test_the_wait_for_a_turn_is_recorded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "TURN_S", 3600.0)
    monkeypatch.setattr(limits, "TURNS_AT_ONCE", 1)
    backend = ScriptedBackend(manual=True)
    async with serving(backend, recorder=Recorder(8)) as port, Connection(port) as first, Connection(port) as second:
        for connection, name in ((first, b"first"), (second, b"second")):
            await connection.send("POST", CHAT, b'{"messages": [{"role": "user", "content": "' + name + b'"}]}')
            await asyncio.sleep(0.05)
        for connection in (first, second):
            generation = await backend.generations.get()
            generation.put(*text_batches("Good ", "day"), None)
            await connection.reply()
        later, earlier = (await call(port, "GET", "/v1/requests")).json["data"]
        assert "turn" not in earlier["phases"]
        assert later["phases"]["turn"] > 0.02
