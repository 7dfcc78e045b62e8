"""An executor with several processes, each of which computes a part of the model.

The first rank's worker runs in this process, the others in processes of their own (`rank`), on this machine or others
(`starting`). Each plan is sent to all ranks. Their workers exchange partial sums and hidden states; the first rank's
result is returned. With pipeline stages, as many plans are in flight as there are stages, each plan in another stage;
all ranks launch and collect them in the first rank's order (`rank`). Every rank samples the tokens itself; after each
step the first rank checks that all results are equal. If a rank ends or its result differs, the engine ends, and its
sequences continue on another engine.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from antiphon.services.engine.adapters.delta import AdapterWeights, LoadedAdapter
from antiphon.services.engine.core.plan import EngineFacts, StepPlan, StepResult
from antiphon.services.engine.executor.adapter_parts import ForgetAdapter, messages_of
from antiphon.services.engine.executor.channel import (
    ChannelClosed,
    Collect,
    Command,
    CompileGrammar,
    Computed,
    Loaded,
    RunPlan,
    digest_of,
)
from antiphon.services.engine.executor.executor import Executor
from antiphon.services.engine.executor.image_parts import parts_of as embeddings_of
from antiphon.services.engine.executor.image_parts import without_embeddings
from antiphon.services.engine.executor.rank_memory import RankMemory, parts_of
from antiphon.services.engine.executor.rank_processes import Rank, RankFailed, RankWatch
from antiphon.services.engine.executor.starting import started_ranks
from antiphon.services.engine.kv.layout import KvMemory
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.parallel.meeting import Meeting
from antiphon.services.engine.parallel.shard import Shard
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import SettingsError
from antiphon.shared.models.model_files import model_directory
from antiphon.shared.parameters.grammar import Grammar

if TYPE_CHECKING:
    from antiphon.services.engine.parallel.communicator import TorchCommunicator

logger = logging.getLogger(__name__)


class MultiprocExecutor(Executor):
    """An executor with a worker in this process and `ranks` in others."""

    def __init__(
        self,
        settings: EngineSettings,
        worker: ModelWorker,
        communicator: TorchCommunicator,
        ranks: list[Rank],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """`release` is called when all ranks have ended."""
        super().__init__(worker)
        self._communicator, self._ranks = communicator, ranks
        self._settings, self._release = settings, release
        self._first_stage = ranks[: settings.parallel.tensor_parallel_size - 1]
        """The other ranks of the first stage, which compute the token embeddings."""
        self._sending = threading.Lock()
        self._forgotten: deque[str] = deque()
        """Versions of adapters that are no longer used but that the other ranks still have."""
        if self.adapters is not None:
            self.adapters.share = self._share
        self._failure = ""
        """The reason why the engine must end; set when a rank has ended."""
        self._wake: Callable[[], None] = lambda: None
        self._watch = RankWatch(ranks, self._ended)

    @classmethod
    def start(cls, settings: EngineSettings) -> MultiprocExecutor:
        """Starts the other ranks and loads the model in all of them.

        Raises SettingsError or ServiceError for settings or a model that cannot work, RankFailed if a rank ends.
        """
        with started_ranks(settings) as started:
            worker, communicator = _load_first(settings, started.meeting)
            try:
                for rank in started.ranks:
                    _check_loaded(rank, worker.facts())
            except BaseException:
                worker.close()  # first, see `rank.load`
                communicator.close()
                raise
        logger.info("%d processes compute the model", len(started.ranks) + 1)
        return cls(settings, worker, communicator, started.ranks, started.release)

    def watch(self, wake: Callable[[], None]) -> None:
        """See Executor."""
        self._wake = wake

    def check(self) -> None:
        """See Executor."""
        if self._failure:
            raise RankFailed(self._failure)

    def launch(self, plan: StepPlan) -> None:
        """See Executor."""
        for part in embeddings_of(plan) if self._first_stage else ():
            self._send(part, self._first_stage)
        self._send(RunPlan(without_embeddings(plan)))
        super().launch(plan)

    def collect(self) -> StepResult:
        """See Executor. Raises RankFailed if a rank has ended, or its result differs from the first rank's."""
        self._send(Collect())
        result = super().collect()
        digest = digest_of(result)
        for rank in self._ranks:
            try:
                reply = rank.channel.reply()
            except ChannelClosed as error:
                raise RankFailed(self._failure or rank.ended()) from error
            if not isinstance(reply, Computed) or (reply.step, reply.digest) != (result.step, digest):
                raise RankFailed(f"rank {rank.number} computed other tokens in step {result.step} than rank 0")
            if reply.gpus:
                rank.uses(reply.gpus)
        return result

    def compile_grammar(self, grammar: Grammar) -> None:
        """See Executor. A grammar that cannot be compiled is refused here; the other ranks ignore it."""
        super().compile_grammar(grammar)
        self._send(CompileGrammar(grammar))

    def kv_memory(self) -> KvMemory:
        """See Executor. All ranks must be on this machine (`parallel.exchanges_kv`)."""
        whole = self._whole
        if whole.layer_kv_heads:
            raise SettingsError(
                "--role: the layers of this model differ in their heads or share keys, and ranks exchange no such "
                "blocks; leave out the role, or use one rank"
            )
        own, stages = super().kv_memory(), self._settings.parallel.pipeline_parallel_size
        num_layers = own.layout.num_layers if stages == 1 else whole.num_layers
        parts = list(parts_of(whole, num_layers, self._shards, [None, *(rank.blocks for rank in self._ranks)]))
        return RankMemory(own, parts, num_layers, whole.num_kv_heads)

    def _share(self, loaded: LoadedAdapter, weights: AdapterWeights) -> None:
        """Sends the other ranks their parts of an adapter. They keep it until `loaded` is no longer referenced here."""
        from antiphon.services.engine.adapters.shards import local_adapter

        for rank, shard in zip(self._ranks, self._shards[1:], strict=True):
            for message in messages_of(local_adapter(weights, self._whole, shard)):
                self._send(message, (rank,))
        weakref.finalize(loaded, self._forgotten.append, loaded.version)

    def close(self) -> None:
        """See Executor. Plans in flight are computed to the end, so that no rank waits for another one."""
        while self.num_in_flight and not self._failure:
            try:
                self.collect()
            except RuntimeError as error:
                logger.warning("a step was not computed to the end: %s", error)
                break
        self._watch.close()
        for rank in self._ranks:
            rank.close()
        self._release()
        super().close()
        self._communicator.close()

    @functools.cached_property
    def _whole(self) -> DecoderDescription:
        from antiphon.services.engine.worker.loading.model_files import describe_model

        return describe_model(model_directory(self._settings))

    @property
    def _shards(self) -> list[Shard]:
        tp_size, pp_size = self._settings.parallel.tensor_parallel_size, self._settings.parallel.pipeline_parallel_size
        return [Shard.of_rank(number, tp_size, pp_size) for number in range(tp_size * pp_size)]

    def _send(self, message: Command, ranks: Sequence[Rank] | None = None) -> None:
        """Sends a message to some of the other ranks, by default to all.

        Pending `ForgetAdapter` messages are sent first.
        """
        # Grammars are compiled and adapters are read on other threads than plans are launched on.
        with self._sending:
            # An adapter is dropped before it can be sent again, and after all plans that use it.
            while self._forgotten:
                self._tell(ForgetAdapter(self._forgotten.popleft()), self._ranks)
            self._tell(message, self._ranks if ranks is None else ranks)

    def _tell(self, message: Command, ranks: Sequence[Rank]) -> None:
        for rank in ranks:
            try:
                rank.channel.send(message)
            except ChannelClosed as error:
                raise RankFailed(rank.ended()) from error

    def _ended(self, how: str) -> None:
        """Called on the watch's thread when a rank has ended.

        Ends a step that waits for this rank, and then the engine.
        """
        logger.error("%s: the engine ends", how)
        self._failure = how
        self._communicator.hang_up()
        for rank in self._ranks:
            rank.channel.hang_up()
        self._wake()


def _load_first(settings: EngineSettings, meeting: Meeting) -> tuple[ModelWorker, TorchCommunicator]:
    # Imported here because importing torch takes seconds, while the other ranks start.
    from antiphon.services.engine.executor.rank import load

    return load(settings, 0, meeting)


def _check_loaded(rank: Rank, facts: EngineFacts) -> None:
    """Waits until a rank has loaded its part. Raises RankFailed, or SettingsError if it would compute other tokens."""
    try:
        reply = rank.channel.reply()
    except ChannelClosed as error:
        raise RankFailed(rank.ended()) from error
    if not isinstance(reply, Loaded):
        raise RankFailed(f"rank {rank.number} has answered out of turn")
    rank.uses(reply.gpus)
    if reply.content != facts.content:
        raise SettingsError(f"rank {rank.number} has other weights than rank 0: all machines need the same files")
    if reply.configuration != facts.configuration:
        raise SettingsError(
            f"rank {rank.number} differs from rank 0 in its processor or GPU, its number of threads (--threads), the "
            "versions of its libraries or the model's config.json, so that it would not compute the same tokens"
        )
