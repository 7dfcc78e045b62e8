"""An executor with several processes on this machine, each of which computes a part of the model.

The first rank's worker runs in this process, the others in processes of their own (`rank`). Each plan is sent to all
ranks, whose workers meet in the sums and hidden states that they exchange; the first rank's result is returned. Every
rank samples by itself: their results must be equal, which is checked after each step. If a rank ends or differs, the
engine ends, and its sequences continue on another one.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from services.engine.adapters.library import AdapterLibrary
from services.engine.core.plan import StepPlan, StepResult
from services.engine.executor.channel import Channel, ChannelClosed, CompileGrammar, Computed, RunPlan, digest_of
from services.engine.executor.uniproc import UniprocExecutor
from services.engine.kv.layout import KvMemory
from services.engine.worker.seam import ModelWorker
from shared.config import EngineSettings, SettingsError, to_argv
from shared.grammar import Grammar
from shared.parallel import world_size

if TYPE_CHECKING:
    from services.engine.parallel.communicator import TorchCommunicator

logger = logging.getLogger(__name__)

END_S = 5.0
"""Seconds that a rank has to end before it is killed."""


class RankFailed(RuntimeError):
    """A rank has ended or computed something else. The engine must end."""


class Rank:
    """A process with one of the other ranks."""

    def __init__(self, settings: EngineSettings, number: int, meeting_file: Path) -> None:
        """Starts the process, which loads its part of the model."""
        ours, theirs = socket.socketpair()
        self.number, self.channel = number, Channel(ours)
        command = [
            sys.executable, "-m", "services.engine.executor.rank", *to_argv(settings),
            f"--rank={number}", f"--meeting-file={meeting_file}", f"--channel={theirs.fileno()}",
        ]  # fmt: skip
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def close(self) -> None:
        """Ends the process."""
        self.channel.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class MultiprocExecutor:
    """An Executor with a worker in this process and `ranks` in others."""

    def __init__(self, worker: ModelWorker, communicator: TorchCommunicator, ranks: list[Rank]) -> None:
        self._local, self._communicator, self._ranks = UniprocExecutor(worker), communicator, ranks
        self._sending = threading.Lock()
        self.facts, self.has_room = self._local.facts, self._local.has_room

    @classmethod
    def start(cls, settings: EngineSettings) -> MultiprocExecutor:
        """Starts the other ranks and loads the model in all of them.

        Raises SettingsError or ServiceError for settings or a model that cannot work, RankFailed if a rank ends.
        """
        with tempfile.TemporaryDirectory(prefix="antiphon-ranks-") as directory:
            meeting_file = Path(directory) / "meeting"
            ranks = [Rank(settings, number, meeting_file) for number in range(1, world_size(settings))]
            try:
                worker, communicator = _load_first(settings, meeting_file)
                for rank in ranks:
                    _reply(rank)
            except BaseException:
                for rank in ranks:
                    rank.process.kill()
                    rank.close()
                raise
        logger.info("%d processes compute the model", len(ranks) + 1)
        return cls(worker, communicator, ranks)

    @property
    def max_in_flight(self) -> int:
        """See Executor."""
        return self._local.max_in_flight

    def launch(self, plan: StepPlan) -> None:
        """See Executor."""
        self._send(RunPlan(plan))
        self._local.launch(plan)

    def collect(self) -> StepResult:
        """See Executor. Raises RankFailed if a rank has ended or its result differs."""
        result = self._local.collect()
        digest = digest_of(result)
        for rank in self._ranks:
            reply = _reply(rank)
            if reply != Computed(result.step, digest):
                raise RankFailed(f"rank {rank.number} computed other tokens in step {result.step} than rank 0")
        return result

    def compile_grammar(self, grammar: Grammar) -> None:
        """See Executor. A grammar that cannot be compiled is refused here; the other ranks pass over it."""
        self._local.compile_grammar(grammar)
        self._send(CompileGrammar(grammar))

    def kv_memory(self) -> KvMemory:
        """See Executor. Each rank has a part of every block, and only whole blocks can be exchanged."""
        raise SettingsError("--role: an engine of several processes cannot exchange KV")

    @property
    def adapters(self) -> AdapterLibrary | None:
        """See Executor. Adapters are not divided among ranks: `shared.adapters` refuses them."""
        return None

    def close(self) -> None:
        """See Executor."""
        for rank in self._ranks:
            rank.close()
        self._local.close()
        self._communicator.close()

    def _send(self, message: RunPlan | CompileGrammar) -> None:
        # Grammars are compiled on other threads than plans are launched on.
        with self._sending:
            for rank in self._ranks:
                try:
                    rank.channel.send(message)
                except ChannelClosed as error:
                    raise RankFailed(_ended(rank)) from error


def _load_first(settings: EngineSettings, meeting_file: Path) -> tuple[ModelWorker, TorchCommunicator]:
    # Imported here because importing torch takes seconds, while the other ranks start.
    from services.engine.executor.rank import load

    return load(settings, 0, meeting_file)


def _reply(rank: Rank) -> object:
    try:
        return rank.channel.reply()
    except ChannelClosed as error:
        raise RankFailed(_ended(rank)) from error


def _ended(rank: Rank) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        rank.process.wait(1.0)
    code = rank.process.returncode
    return f"rank {rank.number} (process {rank.process.pid}) has ended" + ("" if code is None else f" with code {code}")
