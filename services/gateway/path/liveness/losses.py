"""Tells in the log which members are lost, and why. Used by the gateway's actor and the probe."""

import logging

from services.gateway.path.sequence_state import Address
from shared.messages import Heartbeat

log = logging.getLogger(__name__)
SILENT = "it has sent nothing for longer than its lease"
RESTARTED = "its process was started again"
ENDED = "its process has ended"


def told_lost(member: Heartbeat, why: str) -> Address:
    """Logs that a member is lost, and returns its address. A member that was draining has handed over its work."""
    if member.state != "draining":
        log.warning("%s is taken for lost: %s. Its work goes on elsewhere", member.id, why)
    return Address(member.id, member.instance_id)
