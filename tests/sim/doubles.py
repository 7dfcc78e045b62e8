"""The services as the simulation runs them: an engine driven by a task instead of a thread, and files read once."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from antiphon.services.detokenizer.service import DetokenizerService
from antiphon.services.engine.core.invariants import check as check_core
from antiphon.services.engine.engine import Engine
from antiphon.services.engine.service import EngineService
from antiphon.services.engine.steps.loop import StepLoop
from antiphon.services.tokenizer.service import TokenizerService
from tests.sim.transfers import Network, SimConnector

STEP_S = 0.01
CHECKED_STEPS = 3
"""Steps from one check of the core's invariants to the next: checking takes longer than most steps."""


class _Wake(threading.Event):
    """The step loop's event, which also wakes the task that drives it."""

    def __init__(self, woken: asyncio.Event) -> None:
        super().__init__()
        self._woken = woken

    def set(self) -> None:
        super().set()
        self._woken.set()


class TaskLoop:
    """Drives a StepLoop from a task; each step takes `step_s` of virtual time."""

    def __init__(self, steps: StepLoop, on_exit: Callable[[BaseException | None], None]) -> None:
        self.step_s = STEP_S
        self._steps = steps
        self._on_exit = on_exit
        self._stopping = False
        self._woken = asyncio.Event()
        steps._work = _Wake(self._woken)
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        self._stopping = True
        self._woken.set()

    async def join(self, timeout_s: float) -> None:
        await asyncio.wait_for(self._task, timeout_s)

    async def _run(self) -> None:
        error: BaseException | None = None
        steps = 0
        try:
            while not self._stopping:
                self._woken.clear()
                if self._steps.step():
                    steps += 1
                    if steps % CHECKED_STEPS == 0:
                        check_core(self._steps.core)
                    await asyncio.sleep(self.step_s)
                elif not self._woken.is_set():
                    await self._rest()
        except asyncio.CancelledError:
            return
        except BaseException as failure:
            error = failure
        self._on_exit(error)

    async def _rest(self) -> None:
        check_core(self._steps.core)
        self._steps.check_idle()
        now_s, canary = asyncio.get_running_loop().time(), self._steps.canary
        due_s = self._steps.core.scheduler.seconds_to_batch(now_s)
        due_s = due_s if canary is None else min(due_s, canary.seconds_left(now_s))
        try:
            async with asyncio.timeout(None if due_s == float("inf") else due_s):
                await self._woken.wait()
        except TimeoutError:
            return


class SimulatedEngine(EngineService):
    """The engine service without threads. With a role it exchanges KV over `network`; `address` is a sender's."""

    tests_itself = False
    """Whether the engine has a canary, which costs a tenth of a second of real time at its start."""

    def __init__(self, settings, make_worker, network: Network | None = None, address: str = "") -> None:
        super().__init__(settings, make_worker)
        self._network, self._address = network, address

    async def _build(self, clock, kept=None):
        plain = replace(self._settings, role="both")
        on_fault = self._on_fault if self.tests_itself else None
        engine = Engine.build(
            plain, self._reports.put, clock=clock, make_worker=self._make_worker, on_fault=on_fault, kept=kept
        )
        if self._settings.kv_transfer.role != "both":
            assert self._network is not None
            connector: Any = SimConnector(self._network, engine._loop, self._address)
            engine.connector = engine._loop.connector = connector
        return engine

    def _return_memory(self) -> None:
        """A simulation collects no garbage."""

    def _drive(self):
        self.driver = TaskLoop(self.engine._loop, self._on_exit)
        return self.driver


class SimulatedDetokenizer(DetokenizerService):
    """The detokenizer's service; replicas share what they load."""

    def _load(self):
        return _loaded(DetokenizerService._load, self, self._settings.model)


class SimulatedTokenizer(TokenizerService):
    """The tokenizer's service; replicas share what they load."""

    def _load(self):
        return _loaded(TokenizerService._load, self, self._settings.model)


_LOADED: dict[tuple[object, str], Any] = {}


def _loaded(load: Callable[[Any], Any], service: object, model: str) -> Any:
    """Reading the files takes longer than most simulations."""
    if (load, model) not in _LOADED:
        _LOADED[load, model] = load(service)
    return _LOADED[load, model]
