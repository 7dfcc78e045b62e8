"""The service discovery protocol of NATS: answers `nats micro list`, `info` and `stats`, over any transport.

The protocol is defined in ADR-32 of the NATS project, not of this one. Discovery is for operators and their tools only:
the services themselves find each other by heartbeats (`presence`). The subjects are `$SRV.PING`, `$SRV.INFO` and
`$SRV.STATS` for all services; `.name` is appended for one service, `.name.id` for one replica.
"""

import asyncio
import datetime
import functools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from antiphon.shared.bus.transport import Delivery, Subscription, Transport
from antiphon.shared.errors import ServiceError

log = logging.getLogger(__name__)
PREFIX = "$SRV"
VERBS = ("PING", "INFO", "STATS")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A subject that the service subscribes to. `queue` is its queue group, empty if each replica gets all messages."""

    name: str
    subject: str
    queue: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The service's description in its answers. All replicas have the same `name`; `version` is a semantic version."""

    name: str
    id: str
    version: str
    description: str
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    endpoints: Sequence[Endpoint] = ()


class Discovery:
    """Answers discovery requests for one replica.

    `deliveries` returns the number of messages received on a subject. `load` returns the service's load for the STATS
    answer.
    """

    def __init__(
        self,
        transport: Transport,
        identity: Identity,
        *,
        deliveries: Callable[[str], int] = lambda subject: 0,
        load: Callable[[], dict[str, Any]] = dict[str, Any],
    ) -> None:
        self._transport = transport
        self._identity = identity
        self._deliveries = deliveries
        self._load = load
        self._started = datetime.datetime.now(datetime.UTC)
        self._subscriptions: list[Subscription] = []
        self._replies: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Subscribes to the discovery subjects and answers from then on."""
        for verb in VERBS:
            for subject in control_subjects(verb, self._identity.name, self._identity.id):
                receive = functools.partial(self._receive, verb)
                self._subscriptions.append(await self._transport.subscribe(subject, receive))

    async def stop(self) -> None:
        """Ends the subscriptions and waits until the pending answers are sent."""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions.clear()
        if self._replies:
            await asyncio.wait(set(self._replies))

    def answer(self, verb: str) -> dict[str, Any]:
        """Returns the answer to a verb as the JSON object of ADR-32. `verb`: PING, INFO or STATS."""
        common: dict[str, Any] = {
            "type": f"io.nats.micro.v1.{verb.lower()}_response",
            "name": self._identity.name,
            "id": self._identity.id,
            "version": self._identity.version,
            "metadata": self._identity.metadata,
        }
        if verb == "INFO":
            common["description"] = self._identity.description
            common["endpoints"] = [_info(endpoint) for endpoint in self._identity.endpoints]
        if verb == "STATS":
            common["started"] = self._started.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
            common["endpoints"] = [self._stats(endpoint) for endpoint in self._identity.endpoints]
        return common

    def _stats(self, endpoint: Endpoint) -> dict[str, Any]:
        # Processing times and errors are always 0 here: a service's metrics and traces report them.
        return {
            "name": endpoint.name,
            "subject": endpoint.subject,
            "queue_group": endpoint.queue,
            "num_requests": self._deliveries(endpoint.subject),
            "num_errors": 0,
            "last_error": "",
            "processing_time": 0,
            "average_processing_time": 0,
            "data": self._load(),
        }

    def _receive(self, verb: str, delivery: Delivery) -> None:
        if not delivery.reply:
            return
        task = asyncio.create_task(self._reply(verb, delivery.reply))
        self._replies.add(task)
        task.add_done_callback(self._replies.discard)

    async def _reply(self, verb: str, subject: str) -> None:
        try:
            await self._transport.publish(subject, json.dumps(self.answer(verb)).encode())
        except ServiceError as error:
            log.debug("discovery reply not sent: %s", error)


def control_subjects(verb: str, name: str, member_id: str) -> tuple[str, str, str]:
    """Returns the subjects on which a replica receives a verb: for all services, for its name, and for its id."""
    return f"{PREFIX}.{verb}", f"{PREFIX}.{verb}.{name}", f"{PREFIX}.{verb}.{name}.{member_id}"


def _info(endpoint: Endpoint) -> dict[str, Any]:
    return {"name": endpoint.name, "subject": endpoint.subject, "queue_group": endpoint.queue, "metadata": {}}
