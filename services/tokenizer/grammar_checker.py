"""Checks the grammars of requests before they are accepted: the tokenizer's side of `grammar_worker`.

One worker process checks one grammar at a time, which takes milliseconds. It is started at the first grammar. If a
check takes longer than `limits.GRAMMAR_WALL_S`, the worker is killed and the request fails. Verdicts are cached, so
that a schema used by many requests is checked once.
"""

import asyncio
from collections import OrderedDict

from antiphon.services.tokenizer.grammar_frames import GrammarJob, GrammarVerdict
from antiphon.services.tokenizer.worker_process import WorkerLostError, WorkerProcess
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.grammar import SUBJECT, Grammar

WORKER = "antiphon.services.tokenizer.grammar_worker"
FRAME_BYTES_MAX = 64 * 1024


class GrammarChecker:
    """Checks grammars in a worker process."""

    def __init__(self, *, wall_s: float = limits.GRAMMAR_WALL_S) -> None:
        self._wall_s = wall_s
        self._turn = asyncio.Lock()
        self._worker: WorkerProcess[GrammarVerdict] | None = None
        self._verdicts: OrderedDict[Grammar, GrammarVerdict] = OrderedDict()
        """Verdicts of checked grammars; the last used is at the end."""
        self.killed = 0
        """Number of workers lost during a check."""

    async def check(self, grammar: Grammar, param: str) -> None:
        """Raises ServiceError('invalid_value') for a grammar that cannot be used.

        `param`: the request's field. If the grammar has several schemas of the request, it is a pattern such as
        `tools[].function.parameters`, and the error names the wrong schema's place in the brackets.
        """
        verdict = self._verdicts.get(grammar)
        if verdict is None:
            async with self._turn:
                verdict = await self._ask(grammar)
            self._verdicts[grammar] = verdict
            if len(self._verdicts) > limits.GRAMMAR_VERDICTS_MAX:
                self._verdicts.popitem(last=False)
        else:
            self._verdicts.move_to_end(grammar)
        if verdict.error:
            param = param.replace("[]", f"[{verdict.place}]", 1) if verdict.place else param.partition("[]")[0]
            raise ServiceError("invalid_value", verdict.error.replace(SUBJECT, f"'{param}'", 1), param=param)

    async def close(self) -> None:
        """Ends the worker process."""
        if self._worker is not None:
            await self._worker.kill()
            self._worker = None

    async def _ask(self, grammar: Grammar) -> GrammarVerdict:
        worker = self._worker
        if worker is None or not worker.alive:
            await self.close()
            # The first answer includes the start of the interpreter, which the time limit must not include.
            worker = self._worker = await WorkerProcess.start(WORKER, GrammarVerdict, FRAME_BYTES_MAX)
            await self._exchange(worker, Grammar("regex", "a"), limits.GRAMMAR_START_S)
        return await self._exchange(worker, grammar, self._wall_s)

    async def _exchange(
        self, worker: "WorkerProcess[GrammarVerdict]", grammar: Grammar, wall_s: float
    ) -> GrammarVerdict:
        try:
            return await worker.ask(GrammarJob(grammar, wall_s), wall_s)
        except WorkerLostError as lost:
            self.killed += 1
            return GrammarVerdict(f"{SUBJECT} cannot be used: checking it {lost}. Make it smaller or simpler.")
        finally:
            if not worker.fresh:
                await self.close()
