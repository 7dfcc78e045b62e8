"""The requests with an `Idempotency-Key` of all gateways, in a log on the bus with one message for each."""

import hashlib
from collections.abc import Callable, Set

import msgspec

from antiphon.services.gateway.edge.access.log_part import GatewayLogs
from antiphon.services.gateway.edge.http.shared_answers import SharedAnswers, SharedRequest
from antiphon.services.gateway.path.guest import Guest
from antiphon.shared.bus.durable_log import LogUnavailableError
from antiphon.shared.deployment import stores

_DIGITS = 40
_REQUESTS = msgspec.msgpack.Decoder(SharedRequest)
_encode = msgspec.msgpack.Encoder().encode


class BusAnswers(Guest, SharedAnswers):
    """Implements SharedAnswers.

    `heard` returns the living gateways, `can_resume` whether a route's streams are recorded.
    """

    def __init__(
        self, logs: GatewayLogs, heard: Callable[[], Set[tuple[str, str]]], can_resume: Callable[[str], bool]
    ) -> None:
        self.own = logs.host.id, logs.host.instance_id
        self._subjects, self._heard, self._can_resume = logs.host.subjects, heard, can_resume
        self._part = logs.part(stores.repeatable(logs.host.subjects, logs.storage), self._is_own)

    async def find(self, name: str) -> tuple[SharedRequest | None, int]:
        """See SharedAnswers."""
        found = await self._part.log.last(self._subject(name))
        if found is None:
            return None, 0
        return (_decoded(found.payload) if found.payload else None), found.sequence

    async def write(self, client: str, name: str, request: SharedRequest, revision: int) -> int | None:
        """See SharedAnswers."""
        return await self._part.append(client, self._subject(name), _encode(request), last=revision)

    async def drop(self, name: str, revision: int) -> None:
        """See SharedAnswers."""
        await self._part.log.clear(self._subject(name), last=revision)

    def runs_elsewhere(self, request: SharedRequest) -> bool:
        """See SharedAnswers. A gateway whose own heartbeats do not arrive cannot know: then the other one lives."""
        if request.answer is not None or request.owner == self.own:
            return False
        heard = self._heard()
        return self.own not in heard or request.owner in heard

    def can_resume(self, path: str) -> bool:
        """See SharedAnswers."""
        return self._can_resume(path)

    def _subject(self, name: str) -> str:
        return self._subjects.repeatable(hashlib.sha256(name.encode()).hexdigest()[:_DIGITS])

    def _is_own(self, data: bytes) -> bool:
        try:
            return _decoded(data).owner == self.own
        except LogUnavailableError:
            return False


def _decoded(data: bytes) -> SharedRequest:
    try:
        return _REQUESTS.decode(data)
    except msgspec.MsgspecError as error:
        raise LogUnavailableError(f"a request with an Idempotency-Key cannot be read ({error})") from error
