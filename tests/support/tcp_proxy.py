"""A TCP proxy that makes connections slow or narrow, or resets them. Runs on a thread of its own."""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from dataclasses import dataclass, field

CHUNK = 16 * 1024


@dataclass
class TcpProxy:
    """Forwards to 127.0.0.1:`target`. Its settings may change at any time; counters say what it has done.

    `delay_s` and `jitter_s` are added to each chunk in both directions; `bytes_per_s` bounds one direction of one
    connection (0: unbounded).
    """

    target: int
    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    connections: int = 0
    resets: int = 0
    forwarded: int = 0
    delayed: int = 0
    port: int = 0
    _open: set[asyncio.StreamWriter] = field(default_factory=set[asyncio.StreamWriter])
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _ready: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def reset_all(self) -> None:
        """Ends every connection with a reset (RST), not with an orderly end."""
        self._loop.call_soon_threadsafe(self._reset)

    def _reset(self) -> None:
        for writer in tuple(self._open):
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            self.resets += 1

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        self._reset()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        ends = (writer, far_writer)
        self._open.update(ends)
        pumps = [asyncio.ensure_future(self._pump(*pair)) for pair in ((reader, far_writer), (far_reader, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in ends:
                self._open.discard(end)
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Chunks wait for their time in a queue, so that a delay does not bound the rate."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]](1024)

        async def send() -> None:
            free_at = 0.0
            while True:
                due, data = await queue.get()
                free_at = max(free_at, due) + (len(data) / self.bytes_per_s if self.bytes_per_s else 0.0)
                await asyncio.sleep(max(0.0, free_at - loop.time()))
                writer.write(data)
                await writer.drain()
                self.forwarded += len(data)

        sender = asyncio.ensure_future(send())
        with contextlib.suppress(OSError):
            try:
                while data := await reader.read(CHUNK):
                    pause_s = max(0.0, self.delay_s + random.uniform(-self.jitter_s, self.jitter_s))
                    self.delayed += pause_s > 0
                    await queue.put((loop.time() + pause_s, data))
            finally:
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)
