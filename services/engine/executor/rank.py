"""The process of one rank: loads its part of the model and carries out the plans that the first rank sends.

Started by `multiproc` with the engine's settings as flags. It ends when the first rank closes the channel, also by
dying, and when an exchange with another rank fails.
"""

import argparse
import logging
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from services.engine.executor.channel import Channel, ChannelClosed, CompileGrammar, Computed, Loaded, digest_of
from services.engine.executor.uniproc import UniprocExecutor
from services.engine.parallel.communicator import TorchCommunicator
from services.engine.worker.seam import ModelWorker
from shared.config import EngineSettings, SettingsError, add_flags, flag, normalise, parse
from shared.errors import ServiceError

logger = logging.getLogger(__name__)

FAILED, IMPOSSIBLE = 1, 78


@dataclass(frozen=True, kw_only=True)
class RankSettings(EngineSettings):
    """The engine's settings and this process's place."""

    rank: int = flag(0, "number of this rank", group="rank")
    meeting_file: str = flag("", "file over which the ranks meet", group="rank")
    channel: int = flag(-1, "inherited socket to the first rank", group="rank")


def load(settings: EngineSettings, rank: int, meeting_file: Path) -> "tuple[ModelWorker, TorchCommunicator]":
    """Meets the other ranks and returns a worker with this rank's part of the model, and the way to the others."""
    from services.engine.parallel.shard import Shard
    from services.engine.worker.load import choose_device, load_worker

    shard = Shard.of_rank(rank, settings.tensor_parallel_size, settings.pipeline_parallel_size)
    ranks = TorchCommunicator(shard, meeting_file, on_gpu=choose_device(settings.device).type == "cuda")
    try:
        return load_worker(settings, ranks), ranks
    except BaseException:
        ranks.close()
        raise


def serve(executor: UniprocExecutor, channel: Channel) -> None:
    """Carries out commands, one after the other, until the channel closes."""
    while True:
        try:
            command = channel.command()
        except ChannelClosed:
            return
        if isinstance(command, CompileGrammar):
            try:
                executor.compile_grammar(command.grammar)
            except ServiceError as error:
                # The first rank has refused the request for the same reason.
                logger.debug("grammar refused: %s", error)
            continue
        executor.launch(command.plan)
        result = executor.collect()
        channel.send(Computed(result.step, digest_of(result)))


def main(argv: list[str]) -> int:
    """Runs the rank and returns the exit code."""
    parser = argparse.ArgumentParser(prog="rank", allow_abbrev=False)
    add_flags(parser, RankSettings)
    settings = parse(RankSettings, parser.parse_args(normalise(argv)))
    logging.basicConfig(level=settings.log_level.upper(), format=f"rank {settings.rank}: %(levelname)s %(message)s")
    channel = Channel(socket.socket(fileno=settings.channel))
    try:
        worker, ranks = load(settings, settings.rank, Path(settings.meeting_file))
    except (SettingsError, ServiceError) as error:
        # The first rank says the same of the same model.
        logger.error("%s", error)
        return IMPOSSIBLE
    executor = UniprocExecutor(worker)
    channel.send(Loaded(worker.facts().num_blocks))
    try:
        serve(executor, channel)
    except (RuntimeError, ChannelClosed) as error:
        logger.error("ended: %s", error)
        return FAILED
    executor.close()
    ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
