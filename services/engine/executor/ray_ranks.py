"""The other ranks as actors of Ray, on any machine of a Ray cluster: Ray chooses the machines, starts and watches them.

The ranks join the first one over TCP like those of other machines (`joining`), with a key created for this engine.
Step plans, partial sums and hidden states do not pass through Ray. Imports ray, which is an optional dependency.
"""

import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from msgspec.structs import replace
from ray.util.placement_group import (  # pyright: ignore[reportMissingImports]
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

from antiphon.services.engine.executor.channel import Start
from antiphon.services.engine.executor.joining import CONNECT_S, Listener
from antiphon.services.engine.executor.meeting_point import Started, meeting_point
from antiphon.services.engine.executor.rank_processes import Rank, RankFailed
from antiphon.shared.config import EngineSettings
from antiphon.shared.distributed.world import RAY_ADDRESS, world_size
from antiphon.shared.flags import SettingsError, to_argv

logger = logging.getLogger(__name__)

START_S, NOTICE_S = 600.0, 30.0
"""Maximum wait for the cluster's resources and for an actor, and the interval of log messages meanwhile, in seconds."""
_JOIN_TRIES = 60
_OBJECTS_BYTES = 80 * 2**20
"""Size of the object store of a cluster that is started here. It is not used."""
_HERE = 0.001
"""Amount of this node's own resource that is requested to place the first rank on this node."""


class RankActor:
    """Runs one rank within a worker process of Ray."""

    def place(self) -> tuple[str, str, list[str]]:
        """Returns the id and address of the node, and the GPUs that Ray assigned to this actor."""
        context = ray.get_runtime_context()
        gpus = [str(each) for each in context.get_accelerator_ids().get("GPU", [])]
        return context.get_node_id(), ray.util.get_node_ip_address(), gpus

    def run(self, argv: list[str], key: bytes) -> int:
        """Runs the rank until its engine ends. Returns its exit code."""
        from antiphon.services.engine.executor.rank import main

        return main(argv, key)


class RayRank(Rank):
    """A rank that Ray has started."""

    def __init__(self, number: int, place: str, end: socket.socket, actor: Any, running: Any) -> None:
        super().__init__(number, place, end)
        self._actor, self._running = actor, running

    def ended(self) -> str:
        """See Rank."""
        return f"{super().ended()}{_outcome(self._running)}"

    def close(self) -> None:
        """See Rank."""
        super().close()
        ray.kill(self._actor)


def ray_ranks(settings: EngineSettings) -> Started:
    """Starts the other ranks. Raises SettingsError if the cluster does not exist, RankFailed if a rank cannot start."""
    own_cluster = connect()
    group: PlacementGroup | None = None
    try:
        address = ray.util.get_node_ip_address()
        group = _reserve(settings, address)
        return _start(settings, address, group, lambda: _release(group, own_cluster))
    except BaseException:
        _release(group, own_cluster)
        raise


def connect() -> bool:
    """Connects to the cluster of RAY_ADDRESS, or to that of this machine; if there is none, starts one here.

    Returns whether this process has connected. Raises SettingsError if RAY_ADDRESS has a form that cannot be used,
    RankFailed if there is no cluster.
    """
    if ray.is_initialized():
        return False
    named = os.environ.get(RAY_ADDRESS, "")
    if named.startswith("ray://"):
        raise SettingsError(
            f"{RAY_ADDRESS}: {named} is for clients; an engine runs on a node of the cluster: set it to auto, or to "
            "host:port of the head"
        )
    if named not in ("", "auto", "local"):
        _check_reachable(named)
    try:
        ray.init(address=named or "auto", logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as error:
        if named:
            raise RankFailed(f"{RAY_ADDRESS}: no Ray cluster can be used at {named}: {error}") from error
        logger.info("no Ray cluster runs here: one is started on this machine")
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=_OBJECTS_BYTES,
            logging_level=logging.WARNING,
        )
    return True


def _check_reachable(address: str) -> None:
    """Raises RankFailed if nothing listens at an address; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise RankFailed(f"{RAY_ADDRESS}: no Ray cluster can be reached at {address}: {error}") from error


def _reserve(settings: EngineSettings, address: str) -> PlacementGroup:
    """Reserves resources for all ranks, the first on this machine. Raises RankFailed if there are not enough."""
    kind = "CPU" if settings.execution.device == "cpu" or not ray.cluster_resources().get("GPU") else "GPU"
    size = world_size(settings.parallel)
    bundles: list[dict[str, float]] = [{kind: 1.0} for _ in range(size)]
    bundles[0][f"node:{address}"] = _HERE
    group = placement_group(bundles, strategy="PACK")
    deadline = time.monotonic() + START_S
    while not group.wait(NOTICE_S):
        free = ray.available_resources().get(kind, 0)
        missing = f"Ray has {free:g} free {kind}s and the engine needs {size}, one of them on {address}"
        if time.monotonic() > deadline:
            remove_placement_group(group)
            raise RankFailed(missing)
        logger.info("waiting: %s", missing)
    return group


def _start(settings: EngineSettings, address: str, group: PlacementGroup, release: Callable[[], None]) -> Started:
    size, bundles = world_size(settings.parallel), group.bundle_specs
    on_gpu = "GPU" in bundles[0]
    options = {"num_cpus": 0, "num_gpus": 1} if on_gpu else {"num_cpus": 1, "num_gpus": 0}
    kind = ray.remote(RankActor)
    # The actor of the first rank only holds the reservation: the first rank is this process.
    actors = [
        kind.options(
            **options, scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        ).remote()
        for number in range(size)
    ]
    places: list[tuple[str, str, list[str]]] = ray.get([actor.place.remote() for actor in actors], timeout=START_S)
    key = secrets.token_bytes(32)
    gathering = Listener(address, 0, key)
    try:
        argv = [*to_argv(settings), f"--head={address}", f"--master-port={gathering.port}", f"--tries={_JOIN_TRIES}"]
        running = [actors[number].run.remote([*argv, f"--rank={number}"], key) for number in range(1, size)]
        wanted = {number: places[number][1] for number in range(1, size)}
        joined = gathering.gather(wanted, settings, lambda: _check(running))
    finally:
        gathering.close()
    meeting, listener = meeting_point(address)
    on_node = Counter(node for node, _, _ in places)
    ranks: list[Rank] = []
    for number, place in wanted.items():
        rank = RayRank(number, place, joined[number], actors[number], running[number - 1])
        # Ray shows an actor only its own GPU, which has the number 0 there.
        theirs = replace(meeting, listener=-1, address=place, local_size=on_node[places[number][0]])
        rank.channel.send(Start(theirs, settings.scheduler.max_num_seqs))
        ranks.append(rank)
    own = replace(meeting, local_rank=_own_gpu(places[0][2]), local_size=on_node[places[0][0]])
    logger.info("Ray has started %d ranks on %d machines", size, len(on_node))
    return Started(ranks, own, listener, release)


def _own_gpu(given: Sequence[str]) -> int:
    """Returns the index, among this process's GPUs, of the GPU that Ray assigned to the first rank."""
    if not given:
        return 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return int(given[0])
    seen = [word.strip() for word in named.split(",")]
    if given[0] not in seen:
        raise SettingsError(f"CUDA_VISIBLE_DEVICES: Ray gave GPU {given[0]} to this engine, which sees only {named}")
    return seen.index(given[0])


def _check(running: Sequence[Any]) -> None:
    """Raises RankFailed if a rank has ended before it has joined."""
    ended, _ = ray.wait(list(running), num_returns=1, timeout=0)
    if ended:
        raise RankFailed(f"a rank that Ray has started has ended before it has joined{_outcome(ended[0])}")


def _outcome(running: Any) -> str:
    """Returns Ray's reason for the end of an actor, as the last part of a sentence."""
    try:
        return f" (exit code {ray.get(running, timeout=1.0)})"
    except ray.exceptions.GetTimeoutError:
        return ""
    except ray.exceptions.RayError as error:
        return f" ({str(error).splitlines()[0]})"


def _release(group: PlacementGroup | None, own_cluster: bool) -> None:
    if group is not None:
        remove_placement_group(group)
    if own_cluster:
        ray.shutdown()
