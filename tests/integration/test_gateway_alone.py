"""A gateway as a service, without any other: it starts, answers and ends. The bus is the one within the process."""

import asyncio

from antiphon.services.gateway.service import GatewayService
from antiphon.shared.actors.host import Host
from antiphon.shared.clock import SystemClock
from antiphon.shared.config import GatewaySettings
from antiphon.shared.subjects import Subjects
from tests.conftest import Connect
from tests.integration.edge import call


async def test_a_gateway_starts_answers_and_ends(memory_connect: Connect, subjects: Subjects, unused_port: int):
    transport = await memory_connect("gateway-1")
    host = Host(transport=transport, subjects=subjects, clock=SystemClock(), id="gateway-1", instance_id="boot")
    gateway = GatewayService(GatewaySettings(host="127.0.0.1", port=unused_port, record_streams="all"))
    await gateway.start(host)
    running = asyncio.create_task(gateway.run())
    assert (await call(unused_port, "GET", "/livez")).status == 200
    assert (await call(unused_port, "GET", "/v1/models")).json["data"] == []
    refused = await call(unused_port, "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    assert (refused.status, refused.error["code"]) == (503, "no_engine")
    assert not running.done()
    await gateway.drain()
    await running
