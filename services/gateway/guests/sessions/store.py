"""Keeps sessions where responses are kept, for `limits.RESPONSE_TTL_S`, and a list of their ids for each API key."""

import hashlib
import re

import msgspec

from antiphon.services.gateway.edge.access.call import current_call, may_see
from antiphon.services.gateway.guests.responses.stored.records import Records, unavailable
from antiphon.services.gateway.guests.sessions.session import ID_PREFIX, Session, decoded, encoded
from antiphon.shared import limits
from antiphon.shared.bus.durable_log import LogUnavailableError
from antiphon.shared.errors import ServiceError

WHAT = "Sessions"
_ID = re.compile(rf"{ID_PREFIX}[A-Za-z0-9]{{1,59}}")
_LIST = "list-"
_TRIES = 8
_IDS = msgspec.json.Decoder(list[str])


class SessionStore:
    """The sessions of all keys. Methods raise ServiceError('bus_unavailable') if the log does not answer."""

    def __init__(self, records: Records) -> None:
        self._records = records

    async def put(self, session: Session) -> None:
        """Stores a session and adds it to the list of its key. Raises ServiceError if it is too large for the bus."""
        try:
            if not await self._records.write(session.key_name, session.id, encoded(session), {}):
                message = "The session is too large to be kept beside the others of its key."
                raise ServiceError("request_too_large", message)
            await self._change(session.key_name, add=session.id)
        except LogUnavailableError as error:
            raise unavailable(WHAT, error) from error

    async def get(self, session_id: str) -> Session:
        """Returns a session that the current call may see. Raises ServiceError('not_found')."""
        found = await self._records.last(session_id) if _ID.fullmatch(session_id) else None
        session = None if found is None else decoded(found.payload)
        if session is None or not may_see(session.key_name):
            hours = limits.RESPONSE_TTL_S / 3600
            message = (
                f"No session '{session_id}'. A session is kept for {hours:g} hours or until the space is needed: "
                "import its file again."
            )
            raise ServiceError("not_found", message, param="session_id")
        return session

    async def all(self) -> list[Session]:
        """Returns the sessions of the current call's key, the oldest first."""
        ids, _ = await self._listed(current_call().key.name)
        found = list[Session]()
        for session_id in ids:
            if (one := await self._records.last(session_id)) is not None:
                found.append(decoded(one.payload))
        return found

    async def delete(self, session: Session) -> None:
        """Removes a session. Its blocks stay with the engines until their space is needed."""
        await self._records.remove(session.id)
        try:
            await self._change(session.key_name, remove=session.id)
        except LogUnavailableError as error:
            raise unavailable(WHAT, error) from error

    async def _listed(self, key: str) -> tuple[list[str], int]:
        found = await self._records.last(_list_of(key))
        return ([], 0) if found is None else (_IDS.decode(found.payload), found.sequence)

    async def _change(self, key: str, *, add: str = "", remove: str = "") -> None:
        for last in reversed(range(_TRIES)):
            ids, revision = await self._listed(key)
            ids = [one for one in (*ids, add) if one and one != remove][-limits.SESSIONS_MAX :]
            try:
                await self._records.write(key, _list_of(key), msgspec.json.encode(ids), {}, revision)
                return
            except ServiceError as error:
                # Another gateway has changed the list meanwhile.
                if error.code != "conversation_changed" or not last:
                    raise


def _list_of(key: str) -> str:
    return ID_PREFIX + _LIST + hashlib.sha256(key.encode()).hexdigest()[:32]
