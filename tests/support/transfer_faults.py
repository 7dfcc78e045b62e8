"""Faults of transfers of KV, put into the sender of an engine in a test: damaged blocks, silence, a cut connection.

`Faults.install` replaces what a sender's connection does. The product knows nothing of this.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec import structs

from antiphon.services.engine.kv import sender
from antiphon.services.engine.kv.channel import Channel
from antiphon.services.engine.kv.pieces import Bytes
from antiphon.services.engine.kv.wire import Block, Fetch, Header

Kind = Literal["none", "damage", "silence", "cut", "foreign", "short", "twice"]


@dataclass
class Faults:
    """What happens to the blocks that are sent from the `first`-th on (from 0)."""

    kind: Kind = "none"
    first: int = 0
    hits: int = 0
    sent: int = 0
    before: Callable[[], None] | None = None
    """Called before each block, such as to end the process."""

    def install(self) -> Callable[[], None]:
        """Makes all senders of this process faulty. Returns what undoes it."""
        faults = self

        class FaultyChannel(Channel):
            async def send(self, header: Header, data: Bytes | None = None) -> None:
                if not isinstance(header, Block):
                    await super().send(header, data)
                    return
                if faults.before is not None:
                    faults.before()
                faults.sent += 1
                if faults.kind == "none" or faults.sent <= faults.first:
                    await super().send(header, data)
                    return
                faults.hits += 1
                await faults.apply(super().send, header, data)

            async def send_all(self, headers: Sequence[Header]) -> None:
                for header in headers:
                    await self.send(header)

        original = sender.Sender.serve

        async def serve(this: sender.Sender, channel: Channel, fetch: Fetch) -> None:
            channel.__class__ = FaultyChannel
            await original(this, channel, fetch)

        sender.Sender.serve = serve  # type: ignore[method-assign]

        def undo() -> None:
            sender.Sender.serve = original  # type: ignore[method-assign]

        return undo

    async def apply(self, send: Callable, header: Block, data: Bytes | None) -> None:  # type: ignore[type-arg]
        if self.kind == "silence":
            await asyncio.sleep(3600)
        if self.kind == "cut":
            raise ConnectionResetError("cut by the test")
        if self.kind == "damage" and data is not None:
            data[len(data) // 2] ^= 1
        elif self.kind == "damage":
            header = structs.replace(header, checksum=header.checksum ^ 1)
        elif self.kind == "foreign":
            header = structs.replace(header, name=b"?" * 16)
        elif self.kind == "short":
            header = structs.replace(header, num_tokens=1)
        elif self.kind == "twice":
            await send(header, data)
            self.kind = "none"
            if data is not None:
                data ^= 0x55
            header = structs.replace(header, checksum=header.checksum ^ 1)
        await send(header, data)
