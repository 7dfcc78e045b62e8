"""Heartbeats that an actor has received: whether they are what they seem to be."""

from antiphon.shared.actors.actor import Actor, Envelope
from antiphon.shared.messages import Heartbeat
from antiphon.shared.subjects import Subjects, check_id


def heard_on(actor: Actor, envelope: Envelope[Heartbeat], subjects: Subjects) -> Heartbeat | None:
    """Returns the heartbeat in a message; None if it is not genuine, which the actor counts and logs."""
    beat = envelope.message
    if is_genuine(beat, envelope.subject, subjects):
        return beat
    actor.drop(envelope.subject, "the heartbeat is not of the member on whose subject it came, or names no process")
    return None


def is_genuine(heartbeat: Heartbeat, subject: str, subjects: Subjects) -> bool:
    """Whether a heartbeat is of the member on whose subject it came, to which only this member may publish.

    Its ids can then be parts of subjects.
    """
    try:
        check_id(heartbeat.instance_id)
    except ValueError:
        return False
    return subject == subjects.heartbeat(heartbeat.service, heartbeat.id)
