"""Finished responses on the bus: every gateway knows, continues and deletes them."""

from typing import Any

import pytest

from antiphon.services.gateway.edge.access.kept_images import KeptImages
from antiphon.services.gateway.edge.access.log_part import GatewayLogs
from antiphon.shared.actors.host import Host
from antiphon.shared.clock import SystemClock
from tests.integration.edge import ScriptedBackend, call, serving

pytestmark = pytest.mark.nats
PATH = "/v1/responses"


def images_of(transport: Any, subjects: Any) -> KeptImages:
    """What a gateway offers that keeps its responses on the bus."""
    host = Host(transport=transport, subjects=subjects, clock=SystemClock(), id="gateway-1", instance_id="boot")
    return KeptImages(GatewayLogs(host, "memory"))


async def test_a_response_of_one_gateway_is_known_to_another(nats_connect, nats_server, subjects):
    one, two = [images_of(await nats_connect(nats_server, name), subjects) for name in ("one", "two")]
    backend = ScriptedBackend()
    async with (
        serving(ScriptedBackend(), offers=[one]) as first,
        serving(backend, offers=[two]) as second,
    ):
        made = (await call(first, "POST", PATH, {"input": "hi", "instructions": "Be brief."})).json
        path = f"{PATH}/{made['id']}"
        assert (await call(second, "GET", path)).json == made
        items = (await call(second, "GET", f"{path}/input_items")).json["data"]
        assert items[0]["content"][0]["text"] == "hi"
        again = await call(second, "POST", PATH, {"input": "and?", "previous_response_id": made["id"]})
        assert again.status == 200
        assert [message.content for message in backend.requests[0].inputs.messages] == ["hi", "Good day", "and?"]
        assert (await call(second, "DELETE", path)).json["deleted"] is True
        for port in (first, second):
            gone = await call(port, "GET", path)
            assert (gone.status, gone.error["code"]) == (404, "not_found")
        assert (await call(first, "GET", f"{PATH}/resp_*")).status == 404


async def test_without_the_bus_a_response_is_given_but_not_found(private_nats_server, nats_connect, subjects):
    images = images_of(await nats_connect(private_nats_server, "one"), subjects)
    private_nats_server.kill()
    async with serving(ScriptedBackend(), offers=[images]) as port:
        made = await call(port, "POST", PATH, {"input": "hi"})
        assert made.status == 200
        lost = await call(port, "GET", f"{PATH}/{made.json['id']}")
        assert (lost.status, lost.error["code"]) == (503, "bus_unavailable")
    private_nats_server.start()
