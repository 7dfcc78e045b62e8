"""The process of one rank: loads its part of the model and runs the plans that the first rank sends.

Started with the engine's settings as flags: by `rank_processes` on the engine's machine, by `antiphon serve` on other
machines, by an actor of Ray elsewhere. It ends when the first rank closes the channel or dies, and when communication
with another rank fails.
"""

import argparse
import logging
import os
import select
import socket
import sys
import threading
import time
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING

from antiphon.services.engine.executor import Executor
from antiphon.services.engine.executor.adapter_parts import AdapterMessage, AdapterReceiver
from antiphon.services.engine.executor.channel import (
    Channel,
    ChannelClosed,
    CompileGrammar,
    Computed,
    Loaded,
    RunPlan,
    Start,
    digest_of,
)
from antiphon.services.engine.executor.image_parts import EmbeddingsPart, EmbeddingsReceiver
from antiphon.services.engine.executor.joining import JoinRefused, join
from antiphon.services.engine.executor.rank_memory import serve_blocks
from antiphon.services.engine.parallel.meeting import Meeting
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.shared.config import EngineSettings
from antiphon.shared.distributed.machines import addresses
from antiphon.shared.distributed.world import AGAIN, rank_key
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError, add_flags, flag, normalise, parse
from antiphon.shared.observability import resources
from antiphon.shared.observability.logs import configure_logging

if TYPE_CHECKING:
    from antiphon.services.engine.parallel.communicator import TorchCommunicator
    from antiphon.services.engine.parallel.shard import Shard

logger = logging.getLogger(__name__)

FAILED, IMPOSSIBLE = 1, 78
LEAVE_S = 2.0
"""Seconds that a rank has to end after the first rank has ended. Then it exits even in the middle of a collective
operation.
"""


class RankSettings(EngineSettings):
    """The engine's settings and the number of this rank."""

    rank: int = flag(0, "number of this rank", group="rank")
    channel: int = flag(-1, "inherited socket to the first rank (default: it is at --head)", group="rank")
    blocks: int = flag(-1, "inherited socket for KV (default: KV is not exchanged)", group="rank")
    head: str = flag("", "address of the first rank (default: the first of --pod-ips)", group="rank")
    tries: int = flag(0, "how often to try to reach the first rank (0: until it is there)", group="rank")


def load(settings: EngineSettings, rank: int, meeting: Meeting) -> "tuple[ModelWorker, TorchCommunicator]":
    """Meets the other ranks. Returns a worker with this rank's part of the model, and the communicator."""
    # Imported here because a rank that still waits for another machine does not need torch yet.
    import torch

    from antiphon.services.engine.backends.load import choose_device, load_worker
    from antiphon.services.engine.parallel.communicator import TorchCommunicator
    from antiphon.services.engine.parallel.shard import Shard

    shard = Shard.of_rank(rank, settings.parallel.tensor_parallel_size, settings.parallel.pipeline_parallel_size)
    on_gpu = choose_device(settings.execution.device).type == "cuda"
    device = torch.device("cuda", meeting.local_rank) if on_gpu else torch.device("cpu")
    ranks = TorchCommunicator(shard, meeting, device, in_order=settings.execution.deterministic)
    try:
        return load_worker(settings, ranks), ranks
    except BaseException as error:
        forget_worker(error)
        ranks.close()
        raise


def forget_worker(error: BaseException | None) -> None:
    """Frees what the functions that failed had: NCCL waits, when it ends, for the captured graphs that use it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def plans_of(executor: Executor, shard: "Shard") -> int:
    """Returns how many plans a rank may have in flight, see `serve`."""
    return shard.pp_size - shard.pp_rank if shard.pp_size > 1 else executor.max_in_flight


def serve(executor: Executor, channel: Channel, plans_max: int) -> None:
    """Executes commands in order until the channel closes.

    `plans_max`: how many plans this rank may have in flight (`plans_of`): the number of pipeline stages from its own to
    the last one or, with one stage, as many as the first rank has. With this number in flight, it collects the oldest
    plan immediately: the last stage has computed that plan by then, and earlier stages do not wait for it; with one
    stage, the first rank collects it too before it launches another. Otherwise it collects when the first rank does.
    """
    adapters = None if executor.adapters is None else AdapterReceiver(executor.adapters)
    embeddings, told_gpus = EmbeddingsReceiver(), resources.gpus()
    num_early = 0
    while True:
        try:
            command = channel.command()
        except ChannelClosed:
            return
        if isinstance(command, CompileGrammar):
            try:
                executor.compile_grammar(command.grammar)
            except ServiceError as error:
                # Ignored here: the first rank has refused the request for the same reason.
                logger.debug("grammar refused: %s", error)
            continue
        if isinstance(command, AdapterMessage):
            assert adapters is not None, "this rank has no adapters"
            adapters.take(command)
            continue
        if isinstance(command, EmbeddingsPart):
            embeddings.take(command)
            continue
        assert not isinstance(command, Start), "the model is already loaded"
        if isinstance(command, RunPlan):
            executor.launch(embeddings.complete(command.plan))
            if executor.num_in_flight < plans_max:
                continue
            num_early += 1
        elif num_early:
            num_early -= 1
            continue
        result = executor.collect()
        known, told_gpus = told_gpus, resources.gpus()
        channel.send(Computed(result.step, digest_of(result), told_gpus if told_gpus != known else ()))


def main(argv: list[str], key: bytes | None = None) -> int:
    """Runs the rank and returns the exit code. `key`: for joining (default: that of `--cluster-key-file`).

    The exit code AGAIN means that the first rank has ended; the rank should be restarted and wait for it.
    """
    parser = argparse.ArgumentParser(prog="rank", allow_abbrev=False)
    add_flags(parser, RankSettings)
    settings = parse(RankSettings, parser.parse_args(normalise(argv)))
    configure_logging(settings.log_level, f"rank-{settings.rank}", settings.log_format)
    try:
        channel = _channel(settings, key)
    except (SettingsError, JoinRefused) as error:
        logger.error("%s", error)
        return IMPOSSIBLE
    except ConnectionError as error:
        logger.info("the first rank is not there: %s", error)
        return AGAIN
    with channel.socket:
        try:
            start = channel.command()
        except ChannelClosed as error:
            logger.info("the first rank has ended: %s", error)
            return AGAIN
        assert isinstance(start, Start), "the first command says where the ranks meet"
        threading.Thread(target=_leave_with, args=(channel,), name="rank-watch", daemon=True).start()
        return _computed(replace(settings, max_num_seqs=start.max_num_seqs), channel, start.meeting)


def _computed(settings: RankSettings, channel: Channel, meeting: Meeting) -> int:
    """Loads the model and runs plans until the channel closes. Returns the exit code."""
    try:
        worker, ranks = load(settings, settings.rank, meeting)
    except (SettingsError, ServiceError) as error:
        # The first rank reports the same error for the same model.
        logger.error("%s", error)
        return IMPOSSIBLE
    except RuntimeError as error:
        logger.error("the other ranks cannot be reached: %s", error)
        return AGAIN
    executor, facts = Executor(worker), worker.facts()
    if settings.blocks >= 0 and settings.kv_transfer.role != "both":
        arguments = executor.kv_memory(), socket.socket(fileno=settings.blocks)
        threading.Thread(target=serve_blocks, args=arguments, name="rank-kv", daemon=True).start()
    try:
        channel.send(Loaded(facts.num_blocks, facts.configuration, facts.content, resources.gpus()))
        logger.info("rank %d is ready", settings.rank)
        serve(executor, channel, plans_of(executor, ranks.shard))
    except (RuntimeError, ChannelClosed) as error:
        logger.error("ended: %s", error)
        return AGAIN if settings.channel < 0 else FAILED
    executor.close()
    ranks.close()
    return AGAIN if settings.channel < 0 else 0


def _channel(settings: RankSettings, key: bytes | None) -> Channel:
    if settings.channel >= 0:
        return Channel(socket.socket(fileno=settings.channel))
    head = settings.head or addresses(settings.parallel.pod_ips)[0]
    key = rank_key(settings.parallel) if key is None else key
    return Channel(join(head, settings.parallel.master_port, settings.rank, settings, key, tries=settings.tries))


def _leave_with(channel: Channel) -> None:
    """Ends this process shortly after the first rank has ended, even during a collective operation."""
    poll = select.poll()
    poll.register(channel.socket.fileno(), select.POLLRDHUP)
    poll.poll()
    time.sleep(LEAVE_S)
    logger.error("the first rank has ended during an exchange")
    os._exit(AGAIN)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
