"""The sentence of the log about a member that is lost, and what becomes of its requests. Pure."""

from collections.abc import Sequence

from antiphon.shared.messages import EngineStatus, GatewayStatus, Heartbeat, StreamStatus

RESTARTED = "was started again"
ENDED = "has ended"
_NAMES_MAX = 3
"""Largest number of members that are named."""


def silent(seconds: float) -> str:
    """Returns the reason for the loss of a member whose lease has run out. `seconds`: since its last heartbeat."""
    return f"has not been heard from for {seconds:.1f} s"


def report(member: Heartbeat, why: str, num_requests: int, others: Sequence[str]) -> str:
    """Returns the sentence. `num_requests`: those that the member served. `others`: ids of members in its place."""
    return f"{member.id} {why}: {_consequence(member, num_requests, others)}"


def _consequence(member: Heartbeat, num_requests: int, others: Sequence[str]) -> str:
    if isinstance(member.status, GatewayStatus):
        return f"{_its(num_requests)} {_verb(num_requests, 'end')}, unless their clients resume them elsewhere"
    if not isinstance(member.status, EngineStatus | StreamStatus):
        return f"{_named(others)} {_verb(len(others), 'go')} on" if others else f"no other {member.service} is there"
    if not num_requests:
        return "it had no requests"
    if others:
        return f"{_its(num_requests)} {_verb(num_requests, 'move')} to {_named(others)}"
    return f"{_its(num_requests)} {_verb(num_requests, 'wait')} for another {member.service}"


def _its(count: int) -> str:
    return f"its {count} request{'' if count == 1 else 's'}"


def _verb(count: int, verb: str) -> str:
    return verb if count != 1 else f"{verb}es" if verb == "go" else f"{verb}s"


def _named(others: Sequence[str]) -> str:
    rest = len(others) - _NAMES_MAX
    names = [*others[:_NAMES_MAX], *([f"{rest} others"] if rest > 0 else [])]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
