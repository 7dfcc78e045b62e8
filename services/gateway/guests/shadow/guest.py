"""Shadow traffic: copies of a share of the requests run on another version of the model, and their tokens are compared.

A copy begins when its request has ended. It has the same token ids, parameters and seed, so the expected output is
known. Its output is sent to no client; it has no record and counts for no API key. It runs on the engines of the other
version and delays no request.
"""

import asyncio
import logging
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from antiphon.services.gateway.edge.access.call import new_id
from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard, PendingParams, PromptInputs
from antiphon.services.gateway.path.guest import Guest, Running
from antiphon.services.gateway.path.models.versions import VersionDirectory
from antiphon.services.gateway.path.record import NOT_RECORDED
from antiphon.services.gateway.path.requests.request_actor import RequestActor
from antiphon.shared.codec import unpack_ids
from antiphon.shared.config import GatewaySettings
from antiphon.shared.errors import ServiceError

log = logging.getLogger(__name__)
RUNNING_MAX = 8
"""Maximum number of copies that run at the same time; further ones are skipped."""
_SHARES = 1_000_000


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Results of the copies on one version. `position`: first different token of the latest copy that differed."""

    equal: int = 0
    different: int = 0
    failed: int = 0
    skipped: int = 0
    position: int | None = None
    request_id: str = ""
    """The request whose copy differed last."""


Start = Callable[[GenerationRequest, ModelCard], RequestActor]
FindCard = Callable[[str], ModelCard | None]


class ShadowTraffic(Guest):
    """The copies of one gateway. `start` runs a request, `find_card` returns the model with a bus name."""

    def __init__(self, versions: VersionDirectory, start: Start, find_card: FindCard) -> None:
        self._versions, self._start, self._find_card = versions, start, find_card
        self.comparisons: dict[tuple[str, int], Comparison] = defaultdict(Comparison)
        """By model and number of the version."""
        self._tasks: set[asyncio.Task[None]] = set()

    def collectors(self) -> Iterable[Collector]:
        """See Guest."""
        return (ShadowCollector(self.comparisons),)

    def version_facts(self, model: str, number: int) -> dict[str, Any] | None:
        """See Guest: the results of the copies on the version."""
        return facts(self.comparisons[model, number]) if (model, number) in self.comparisons else None

    def served(self, running: Running) -> None:
        """See Guest. Runs a copy of the request on the shadow version, if it is in the share that is to be copied.

        Beam searches, pooling requests, requests with adapters, and requests with images (whose files are no longer
        available) are not copied.
        """
        if (shadow := self._versions.shadows.get(running.card.name)) is None:
            return
        request = running.request
        other_kind = request.pooling is not None or request.params.beam is not None or bool(request.inputs.images)
        if running.error is not None or other_kind:
            return
        state, internal, share = shadow
        # The selection depends only on the id, so it is evenly distributed and needs no state.
        if zlib.crc32(request.request_id.encode()) % _SHARES >= share * _SHARES or state.shadow is None:
            return
        comparison = self.comparisons[state.name, state.shadow.number]
        card = self._find_card(internal)
        if card is None or len(self._tasks) >= RUNNING_MAX:
            comparison.skipped += 1
            return
        task = asyncio.get_running_loop().create_task(self._compare(running, card, comparison))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compare(self, actor: Running, card: ModelCard, comparison: Comparison) -> None:
        copy = self._start(_copy(actor), card)
        try:
            async for _ in copy.updates():
                pass
        except ServiceError as error:
            comparison.failed += 1
            log.info("the copy of %s failed: %s", actor.request.request_id, error.message)
            return
        # The tokens are taken from the sequences, because the updates lack the tokens with which a fork begins.
        tokens = [(one.token_ids, other.token_ids) for one, other in zip(actor.sequences, copy.sequences, strict=True)]
        position = min((_first(*pair) for pair in tokens if pair[0] != pair[1]), default=None)
        if position is None:
            comparison.equal += 1
            return
        comparison.different += 1
        comparison.position, comparison.request_id = position, actor.request.request_id


class ShadowCollector(Collector):
    """Exports the comparisons as metrics."""

    def __init__(self, comparisons: Mapping[tuple[str, int], Comparison]) -> None:
        self._comparisons = comparisons

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        labels = ("model_name", "version", "result")
        copies = CounterMetricFamily("antiphon:shadow_requests", "Copies of requests on another version", labels=labels)
        for (name, number), one in self._comparisons.items():
            for result in ("equal", "different", "failed", "skipped"):
                copies.add_metric([name, str(number), result], getattr(one, result))
        yield copies


def facts(one: Comparison) -> dict[str, Any]:
    """Returns a comparison in the form of `GET /admin/models`."""
    return {
        "equal": one.equal,
        "different": one.different,
        "failed": one.failed,
        "skipped": one.skipped,
        "last_difference": {"request": one.request_id, "position": one.position} if one.request_id else None,
    }


def _copy(actor: Running) -> GenerationRequest:
    params = msgspec.structs.replace(actor.messages.request.params, end_token_ids=actor.prompts[0].end_token_ids)
    return replace(
        actor.request,
        request_id=new_id(),
        params=params,
        inputs=PromptInputs(token_ids=tuple(tuple(unpack_ids(prompt.packed)) for prompt in actor.prompts)),
        pending=PendingParams(),
        timeout_s=0.0,
        origin=replace(actor.request.origin, trace_headers={}, record=NOT_RECORDED),
        guests=replace(actor.request.guests, resumed=None, engine=""),
    )


def _first(expected: list[int], found: list[int]) -> int:
    pairs = enumerate(zip(expected, found, strict=False))
    return next((position for position, (one, other) in pairs if one != other), min(len(expected), len(found)))


def make(gateway: GatewayActor, settings: GatewaySettings) -> ShadowTraffic:
    """See `guests.make_guests`."""
    return ShadowTraffic(gateway.versions, gateway.backend.start_alone, gateway.catalog.find_on_bus)
