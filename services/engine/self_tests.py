"""Runs the tests of this engine for which gateways ask (`SelfTest`), and sends their results."""

import asyncio
from collections.abc import Callable

from antiphon.services.engine.engine import Engine
from antiphon.services.engine.publisher import Publisher
from antiphon.shared import limits
from antiphon.shared.actors.actor import Envelope, handles
from antiphon.shared.actors.background import Background
from antiphon.shared.actors.host import Host
from antiphon.shared.messages import SelfTest, SelfTestReply


class SelfTests:
    """The tests of one engine, which `engine` returns; None while it sleeps.

    `fault` tells what is wrong with it, "" if nothing is known; `on_fault` ends it.
    """

    def __init__(
        self,
        host: Host,
        engine: Callable[[], Engine | None],
        publisher: Publisher,
        *,
        fault: Callable[[], str],
        on_fault: Callable[[str], None],
    ) -> None:
        self._host, self._engine, self._publisher = host, engine, publisher
        self._fault, self._on_fault = fault, on_fault
        self._running = Background("a self-test failed")

    @handles(SelfTest)
    def on_self_test(self, envelope: Envelope[SelfTest]) -> None:
        """Starts a test of this engine."""
        self._running.spawn(self._run(envelope.message))

    async def _run(self, message: SelfTest) -> None:
        """Runs the canary and checks all weights immediately, and sends the result."""
        engine = self._engine()
        parts = () if engine is None else (engine.canary, engine.guard)
        tests = [part.run_now() for part in parts if part is not None]
        if tests:
            await asyncio.wait([asyncio.wrap_future(test) for test in tests], timeout=limits.SELF_TEST_S / 2)
        fault = self._fault()
        reply = SelfTestReply(message.test_id, self._host.id, self._host.instance_id, fault)
        self._publisher.in_parts(message.reply_subject, lambda part: part[0], (reply,))
        if message.ends and not fault:
            self._on_fault("a comparison with other engines has shown that it computes other tokens than they do")
