"""Holds sequences back until their grammar is compiled and their adapter is in memory, so that no step waits for these.

Compiling and loading run on one thread of the lowest priority, so the computing threads are hardly slowed down. Clients
share that thread by the time that their sequences take (`fair_order`): many slow grammars of one do not hold up others.
Sequences without grammar and adapter pass at once. Used by `Engine`.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from antiphon.services.engine.core.request import Adapter, SequenceSpec, with_adapter
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.structures.fair_order import FairOrder

log = logging.getLogger(__name__)
LOWEST_PRIORITY = 19
_ANY_JSON = Grammar("json_object")
"""Compiled for a thinking budget, because then the texts of all tokens, which it needs, are in memory."""
LoadAdapter = Callable[[], Adapter]
"""Reads an adapter into memory. Raises ServiceError."""


class GrammarGate:
    """The gate in front of a step loop. `add` and `abort` may be called from any thread.

    `compile`: compiles a grammar or raises ServiceError. `admit`, `abort` and `refuse`: the step loop's methods.
    """

    def __init__(
        self,
        compile: Callable[[Grammar], None],
        admit: Callable[[SequenceSpec], None],
        abort: Callable[[str], None],
        refuse: Callable[[str, ServiceError], None],
    ) -> None:
        self._compile = compile
        self._admit = admit
        self._abort = abort
        self._refuse = refuse
        self._lock = threading.Lock()
        self._held: set[str] = set()
        self._order = FairOrder()
        self._lines: dict[str, deque[tuple[SequenceSpec, LoadAdapter | None]]] = {}
        """The sequences that wait for the thread, by client. The client whose sequence is prepared has a line too."""
        self._thread = ThreadPoolExecutor(1, "grammars", initializer=_lower_priority)

    def __len__(self) -> int:
        """Returns the number of sequences that are held back."""
        return len(self._held)

    def add(self, spec: SequenceSpec, load_adapter: LoadAdapter | None = None) -> None:
        """Admits a sequence to the step loop when its grammar is compiled and its adapter is loaded.

        Refuses it if that fails.

        `load_adapter` returns the adapter of a sequence whose `adapter` is not in memory yet.
        """
        if spec.params.grammar is None and spec.params.thinking is None and load_adapter is None:
            self._admit(spec)
            return
        with self._lock:
            self._held.add(spec.sequence_id)
            self._lines.setdefault(spec.client, deque()).append((spec, load_adapter))
            self._order.activate(spec.client, spec.client_weight, spec.client_priority)
        self._thread.submit(self._prepare_next)

    def abort(self, sequence_id: str) -> None:
        """Ends a sequence, whether it is held back or not."""
        with self._lock:
            self._held.discard(sequence_id)
            self._abort(sequence_id)

    def close(self) -> None:
        """Waits for the compilation that is running, if any, and drops the others."""
        self._thread.shutdown(cancel_futures=True)

    def _prepare_next(self) -> None:
        with self._lock:
            client = self._order.first()
            assert client is not None, "as many sequences wait as have been submitted"
            line = self._lines[client]
            spec, load_adapter = line.popleft()
        began_s = time.thread_time()
        self._prepare(spec, load_adapter)
        with self._lock:
            self._order.serve(client, time.thread_time() - began_s)
            if not line:
                del self._lines[client]
                self._order.deactivate(client)

    def _prepare(self, spec: SequenceSpec, load_adapter: LoadAdapter | None) -> None:
        error: ServiceError | None = None
        try:
            if spec.sequence_id in self._held and load_adapter is not None:
                spec = with_adapter(spec, load_adapter())
            if spec.sequence_id in self._held and spec.params.thinking is not None:
                self._compile(_ANY_JSON)
            if spec.sequence_id in self._held and spec.params.grammar is not None:
                self._compile(spec.params.grammar)
        except ServiceError as refusal:
            error = refusal
        except Exception:
            log.exception("what the sequence %s needs could not be prepared", spec.sequence_id)
            error = ServiceError("internal_error", "The grammar or the adapter of the request could not be prepared.")
        with self._lock:
            if spec.sequence_id not in self._held:
                return
            self._held.discard(spec.sequence_id)
            if error is None:
                self._admit(spec)
            else:
                self._refuse(spec.sequence_id, error)


def _lower_priority() -> None:
    if sys.platform == "linux":
        # On Linux each thread has its own priority.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
