"""Which engine keeps the copies of another one. Pure."""

from collections.abc import Collection, Iterable

from antiphon.shared.messages import EngineStatus, Heartbeat


def next_keeper(
    own_id: str, own: EngineStatus, engines: Iterable[Heartbeat], avoid: Collection[str]
) -> Heartbeat | None:
    """Returns the engine that is to keep the copies of `own_id`; None if there is none.

    Only a ready engine can that computes the same numbers and stores KV in another directory. Engines form a ring in
    the order of their ids, and each takes the next one, so that copies are spread without an agreement.
    `avoid`: instance ids of engines that have not kept copies lately.
    """
    others = (beat for beat in engines if beat.id != own_id and beat.instance_id not in avoid)
    able = sorted((beat for beat in others if _can_keep(own, beat)), key=lambda beat: beat.id)
    return next((beat for beat in able if beat.id > own_id), able[0] if able else None)


def _can_keep(own: EngineStatus, beat: Heartbeat) -> bool:
    status = beat.status
    if beat.state != "ready" or not isinstance(status, EngineStatus):
        return False
    is_same = (status.content, status.configuration) == (own.content, own.configuration)
    return is_same and bool(status.kv_store) and status.kv_store != own.kv_store
