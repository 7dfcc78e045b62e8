"""Starts the ranks of an engine, on this machine, on several, or by Ray, and tells them where to meet."""

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from antiphon.services.engine.executor.channel import Start
from antiphon.services.engine.executor.joining import Listener
from antiphon.services.engine.executor.meeting_point import Started, meeting_point
from antiphon.services.engine.executor.rank_processes import LocalRank, Rank
from antiphon.services.engine.parallel.meeting import Meeting
from antiphon.shared.config import EngineSettings
from antiphon.shared.distributed.machines import find_machines
from antiphon.shared.distributed.world import rank_key, uses_ray, world_size
from antiphon.shared.flags import SettingsError

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def started_ranks(settings: EngineSettings) -> Iterator[Started]:
    """Starts the other ranks; kills them if the block raises. The block must last until all have loaded the model.

    Raises SettingsError or ServiceError for settings that cannot work, RankFailed if a rank ends.
    """
    with contextlib.ExitStack() as stack:
        if uses_ray(settings.parallel):
            from antiphon.services.engine.executor.ray_ranks import ray_ranks

            started = ray_ranks(settings)
        elif settings.parallel.nnode > 1:
            started = _over_machines(settings)
        else:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="antiphon-ranks-"))
            started = _on_this_machine(settings, Path(directory))
        if started.listener is not None:
            stack.enter_context(started.listener)
        try:
            yield started
        except BaseException:
            for rank in started.ranks:
                rank.kill()
            started.release()
            raise


def _on_this_machine(settings: EngineSettings, directory: Path) -> Started:
    size = world_size(settings.parallel)
    meeting = Meeting(path=str(directory / "meeting"), local_size=size)
    ranks: list[Rank] = [LocalRank(settings, number) for number in range(1, size)]
    for rank in ranks:
        rank.channel.send(Start(replace(meeting, local_rank=rank.number), settings.scheduler.max_num_seqs))
    return Started(ranks, meeting)


def _over_machines(settings: EngineSettings) -> Started:
    """Waits for the ranks of the other machines, and then starts the ranks of this machine, the head."""
    machines, size = find_machines(settings.parallel), world_size(settings.parallel)
    if not machines.is_head:
        raise SettingsError(
            f"--pod-ips: the engine belongs to the first machine, {machines.addresses[0]}, and this is "
            f"{machines.address}; here `antiphon serve` starts the other ranks"
        )
    places = {
        number: machines.addresses[machine]
        for machine in range(1, len(machines.addresses))
        for number in machines.ranks(machine, size)
    }
    gathering = Listener(machines.address, settings.parallel.master_port, rank_key(settings.parallel))
    try:
        joined = gathering.gather(places, settings)
    finally:
        gathering.close()
    own = machines.ranks(0, size)
    meeting, listener = meeting_point(machines.address)
    meeting = replace(meeting, local_size=len(own))
    local = [LocalRank(settings, number) for number in own[1:]]
    remote = [Rank(number, place, joined[number]) for number, place in places.items()]
    ranks: list[Rank] = [*local, *remote]
    for rank in ranks:
        theirs = replace(meeting, listener=-1, address=places.get(rank.number, machines.address))
        rank.channel.send(Start(replace(theirs, local_rank=rank.number % len(own)), settings.scheduler.max_num_seqs))
    logger.info("%d ranks on %d machines load the model", size, len(machines.addresses))
    return Started(ranks, meeting, listener)
