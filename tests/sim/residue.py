"""What a society still keeps of requests that have ended: empty when everything has been let go."""

from antiphon.services.engine.core.invariants import check as check_core
from tests.sim.society import Member, Society


def residue(society: Society) -> list[str]:
    """One sentence for each thing that is left."""
    found: list[str] = []
    for member in society.members.values():
        found += [f"{member.name} {what}" for what in _of_member(member)]
    return found


def _of_member(member: Member) -> list[str]:
    found = []
    if member.kind == "engine":
        found = _of_engine(member)
    elif member.kind == "detokenizer" and member.service._actor.num_streams:
        found.append(f"has {member.service._actor.num_streams} streams open")
    elif member.kind == "gateway" and member.service.actor.backend.requests:
        found.append(f"has the requests {list(member.service.actor.backend.requests)}")
    elif member.kind == "gateway" and (len(member.service.actor.parts.dispatcher.queue) or _watched(member)):
        found.append(f"has sequences in its queue or on {_watched(member)}")
    extra = len(member.process.tasks()) - member.num_tasks
    if extra > 0:
        names = [getattr(task.get_coro(), "__qualname__", "") for task in member.process.tasks()[member.num_tasks :]]
        found.append(f"has {extra} tasks more than at its start: {names}")
    if member.transport._waiting:
        found.append(f"waits for {len(member.transport._waiting)} answers")
    return found


def _watched(member: Member) -> list[object]:
    return member.service.actor.parts.watch.engines()


def _of_engine(member: Member) -> list[str]:
    engine, sequences, found = member.service.engine, member.service.actor.sequences, []
    core = engine._core
    check_core(core)
    if len(sequences):
        found.append(f"keeps {[entry.sequence_id for entry in sequences.entries()]}")
    load = core.load()
    if core.sequences or load.num_running or load.num_waiting or core.groups:
        found.append(f"computes {list(core.sequences)}")
    if load.num_free_blocks != engine.facts.num_blocks:
        found.append(f"holds {engine.facts.num_blocks - load.num_free_blocks} blocks")
    if core.swap.pool.num_free != core.swap.pool.num_blocks:
        found.append(f"holds {core.swap.pool.num_blocks - core.swap.pool.num_free} host blocks")
    if engine.in_flight:
        found.append("has plans in flight")
    return found
