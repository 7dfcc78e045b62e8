"""Publishes batches of KV events on a ZeroMQ PUB socket, and sends earlier ones again on a ROUTER socket.

A message has three frames: topic, sequence number (8 bytes, big endian), and the batch (`events.EventBatch`). A request
for a replay is the first wanted number; the answers have number and batch, the last one the number -1 and no batch. The
sockets belong to a thread of their own, which sleeps while nothing happens.
"""

import contextlib
import logging
import socket
import threading
import time
from collections import deque

import msgspec
import zmq

from antiphon.services.engine.core.core import Core
from antiphon.services.engine.kv_events.events import AllBlocksCleared, EventBatch, EventCollector, KvEvent
from antiphon.shared.flags import SettingsError
from antiphon.shared.settings.kv_events import KvEventsConfig

log = logging.getLogger(__name__)
END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number that ends a replay."""
GATHER_S = 0.005
"""Time for which the events of a step are gathered into a batch, seconds."""
JOIN_S = 2.0
EVENTS_MAX = 100_000
"""Largest `max_queue_size`, so that a wrong option cannot fill the memory. vLLM's default."""


class KvEventPublisher:
    """The publisher of one engine. Raises SettingsError if an endpoint cannot be used."""

    def __init__(self, config: KvEventsConfig, core: Core) -> None:
        self._config = config
        self._context = zmq.Context()
        self._is_woken = False
        self._ends = False
        self._sequence = 0
        self._topic = config.topic.encode()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._encoder = msgspec.msgpack.Encoder()
        try:
            self._pub = self._open(zmq.PUB, config.endpoint, binds=_binds(config.endpoint))
            self._replay = None
            if config.replay_endpoint:
                self._replay = self._open(zmq.ROUTER, config.replay_endpoint, binds=True)
        except SettingsError:
            self._context.destroy(linger=0)
            raise
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self.collector = EventCollector(core.facts.block_size, min(config.max_queue_size, EVENTS_MAX), self._wake)
        core.pool.watchers = (*core.pool.watchers, self.collector)
        core.prefix_cache.on_published = self.collector.published
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        log.info("KV events are published on %s", config.endpoint)

    def close(self) -> None:
        """Closes the sockets. To be called when no step runs any more."""
        self._ends = True
        self._wake()
        self._thread.join(JOIN_S)
        self._waker.close()

    def _open(self, kind: int, endpoint: str, *, binds: bool) -> "zmq.Socket[bytes]":
        opened = self._context.socket(kind)
        opened.setsockopt(zmq.SNDHWM, self._config.hwm)
        opened.setsockopt(zmq.LINGER, 0)
        try:
            if binds:
                opened.bind(endpoint)
            else:
                opened.connect(endpoint)
        except zmq.ZMQError as error:
            message = f"--kv-events-config: the endpoint {endpoint!r} cannot be used ({error}): choose another one"
            raise SettingsError(message) from error
        return opened

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(OSError):  # the thread has ended, and has logged why
                self._waker.send(b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken.fileno(), zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            self._publish([AllBlocksCleared()])
            while not self._ends:
                ready = {found for found, _ in poller.poll()}
                if self._replay in ready:
                    self._answer()
                if self._woken.fileno() in ready:
                    time.sleep(GATHER_S)
                    self._woken.recv(64)
                    self._is_woken = False
                    self._publish(self.collector.take())
        except Exception:
            log.exception("KV events are not published any more")
        finally:
            self._context.destroy(linger=0)
            self._woken.close()

    def _publish(self, events: list[KvEvent]) -> None:
        if self.collector.lost:
            # The number that is left out shows receivers the gap.
            self.collector.lost = False
            self._sequence += 1
            log.warning("more KV events than max_queue_size: some were dropped")
        if not events:
            return
        payload = self._encoder.encode(EventBatch(time.time(), events, 0))
        number = self._sequence.to_bytes(8, "big")
        self._pub.send_multipart((self._topic, number, payload))
        self._sent.append((self._sequence, payload))
        self._sequence += 1

    def _answer(self) -> None:
        assert self._replay is not None
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != len(END):
            log.warning("a malformed request for a replay of KV events")
            return
        client, _, first = frames
        wanted = int.from_bytes(first, "big")
        for number, payload in self._sent:
            if number >= wanted:
                self._replay.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
        self._replay.send_multipart((client, b"", END, b""))


def _binds(endpoint: str) -> bool:
    """Whether the PUB socket binds, as in vLLM; otherwise it connects to a receiver that binds."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
