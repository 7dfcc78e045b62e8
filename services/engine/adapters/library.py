"""The adapters that an engine can use, and which of them are in memory. Thread-safe.

An adapter is identified by its version, a hash of its files, so the adapter of a running request never changes. A
limited number of adapters is cached in memory for future requests; adapters of waiting and running sequences stay as
long as the sequences use them. An adapter that is not in memory is read again from its directory, and is refused if the
files there have changed.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from antiphon.services.engine.adapters.delta import AdapterWeights, LoadedAdapter
from antiphon.shared.models.adapter_config import adapter_directory, unusable

if TYPE_CHECKING:  # It imports torch, which the service does only while it loads its model.
    from antiphon.services.engine.adapters.peft_files import AdapterReader


class AdapterLibrary:
    """The adapters of one engine. `prepare` converts an adapter to the backend's form.

    `capacity`: number of LoRA adapters kept in memory; `prompt_capacity`: the same for prompt adapters.
    """

    def __init__(
        self,
        reader: "AdapterReader",
        prepare: Callable[[AdapterWeights], object],
        capacity: int,
        prompt_capacity: int = 0,
    ) -> None:
        self._reader, self._prepare = reader, prepare
        self._capacities = capacity, prompt_capacity
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        """Held while files are read, so that several requests for one adapter read it once."""
        self._alive: weakref.WeakValueDictionary[str, LoadedAdapter] = weakref.WeakValueDictionary()
        self._given: dict[str, LoadedAdapter] = {}
        """Adapters that another rank has read and sent (`accept`)."""
        self.share: Callable[[LoadedAdapter, AdapterWeights], None] | None = None
        """Callback for a newly read adapter, called before any sequence can use it."""
        self._kept: tuple[OrderedDict[str, LoadedAdapter], ...] = OrderedDict(), OrderedDict()
        """Cached LoRA adapters and cached prompt adapters, each with the least recently used first."""

    def load(self, name: str, path: str, version: str = "") -> LoadedAdapter:
        """Returns an adapter, read from its directory if it is not in memory. Takes as long as reading the files.

        Without `version`, the present version of the directory is loaded. Raises ServiceError, see
        `AdapterReader.read`, and if the directory no longer has that version.
        """
        directory = adapter_directory(path)
        found = self.find(version or self._reader.version(directory, name))
        if found is not None:
            return found
        with self._reading:
            found = self.find(version)
            if found is not None:
                return found
            weights = self._reader.read(directory, name)
            if version and weights.version != version:
                raise unusable(name, f"the files in {directory} have changed: load the adapter again")
            count = 0 if weights.virtual is None else len(weights.virtual)
            loaded = LoadedAdapter(weights.version, weights.rank, self._prepare(weights), count)
            if self.share is not None:
                self.share(loaded, weights)
            return self._keep(loaded)

    def accept(self, weights: AdapterWeights) -> None:
        """Keeps this rank's part of an adapter that another rank has read, until `forget`."""
        count = 0 if weights.virtual is None else len(weights.virtual)
        loaded = LoadedAdapter(weights.version, weights.rank, self._prepare(weights), count)
        with self._lock:
            self._given[loaded.version] = loaded

    def forget(self, version: str) -> None:
        """Drops an adapter that `accept` has kept."""
        with self._lock:
            self._given.pop(version, None)

    def find(self, version: str) -> LoadedAdapter | None:
        """Returns the adapter with this version if it is in memory."""
        with self._lock:
            found = self._given.get(version) or self._alive.get(version)
            if found is not None and version in (kept := self._kept[found.num_virtual_tokens > 0]):
                kept.move_to_end(version)
            return found

    def _keep(self, adapter: LoadedAdapter) -> LoadedAdapter:
        with self._lock:
            found = self._alive.setdefault(adapter.version, adapter)
            kind = found.num_virtual_tokens > 0
            kept = self._kept[kind]
            kept[found.version] = found
            kept.move_to_end(found.version)
            while len(kept) > self._capacities[kind]:
                kept.popitem(last=False)
            return found
