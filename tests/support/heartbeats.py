"""Heartbeats, and the status of a small engine."""

from typing import Any

from antiphon.shared import limits
from antiphon.shared.actors.host import Status
from antiphon.shared.messages import EngineCounters, EngineLoad, EngineStatus, Heartbeat, ServiceName, ServiceState


def heartbeat(
    service: ServiceName,
    member_id: str,
    instance_id: str,
    status: Status,
    *,
    state: ServiceState = "ready",
    sequence: int = 1,
    interval_s: float = 0.1,
    **fields: Any,
) -> Heartbeat:
    """`fields`: further fields of the heartbeat."""
    return Heartbeat(
        service=service,
        id=member_id,
        instance_id=instance_id,
        protocol=limits.PROTOCOL_VERSION,
        state=state,
        sequence=sequence,
        interval_s=interval_s,
        status=status,
        **fields,
    )


def engine_status(model: str = "toy", **fields: Any) -> EngineStatus:
    """`fields`: those of the status, of its load and of its counters, beside each other."""
    load = {name: fields.pop(name) for name in EngineLoad.__struct_fields__ if name in fields}
    counters = {name: fields.pop(name) for name in EngineCounters.__struct_fields__ if name in fields}
    sizes = {"max_model_len": 512, "vocab_size": 300, "block_size": 16, "num_blocks": 100, "max_num_seqs": 8}
    return EngineStatus(
        model=model,
        load=EngineLoad(**load),
        counters=EngineCounters(**counters),
        **{"model_path": f"/models/{model}", **sizes, **fields},
    )
