"""Synchronizes an engine's LoRA adapters with the desired state of its model, and finds the adapter of each sequence.

The desired state lists the adapters that a model has (`antiphon.shared.deployment.adapter_state`). The engine reads it
before the engine is ready, when a gateway announces a change, and periodically. Sequences name an adapter by its
version. The old version of a replaced or unloaded adapter stays usable for `ADAPTERS_REPLACED_S`, for requests that
were accepted before the change. The actor has its own mailbox, so that reading an adapter does not delay sequences.
"""

import asyncio
import logging
from collections.abc import Callable

from antiphon.services.engine.adapters.delta import LoadedAdapter
from antiphon.services.engine.adapters.library import AdapterLibrary
from antiphon.shared import limits
from antiphon.shared.actors.actor import Actor, Envelope, handles
from antiphon.shared.actors.host import Host
from antiphon.shared.deployment.adapter_state import AdapterRecord, AdapterState, AdapterStore, now
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import AdapterLoaded, AdaptersChanged, LoadAdapter
from antiphon.shared.models.adapters import LoraModule, check_place

log = logging.getLogger(__name__)


class AdapterNotHereError(Exception):
    """The engine does not know an adapter yet.

    It reads the desired state now; the gateway may send the sequence again shortly.
    """


class AdapterActor(Actor):
    """The adapters of one engine. `modules`: those of `--lora-modules`; `model`: the model's served name.

    `roots`: the directories below which adapters must be that requests load; none: any directory.
    """

    def __init__(
        self,
        host: Host,
        library: AdapterLibrary,
        model: str,
        modules: list[LoraModule],
        kept: int,
        roots: tuple[str, ...] = (),
    ) -> None:
        super().__init__(f"adapters of {host.id}", host.transport)
        self.revision = 0
        """Revision of the desired state that this engine follows."""
        self._host, self._model, self._modules, self._kept = host, model, modules, kept
        self._library = library
        self._sleeps = False
        self._roots = roots
        self._store = AdapterStore(host)
        self._records: dict[str, AdapterRecord] = {}
        self._paths: dict[str, tuple[str, str]] = {}
        """Name and path of each current version."""
        self._retired: dict[str, tuple[float, tuple[str, str], LoadedAdapter | None]] = {}
        """Replaced or unloaded versions: the time until which they are usable, their name and path, and the adapter if
        it was in memory.
        """
        self._looked_for: dict[str, float] = {}
        """Unknown versions that sequences named: the time of the first such sequence, monotonic seconds."""
        self._synced_at = -1.0
        """When the last reading of the desired state began, monotonic seconds."""
        self._syncing: asyncio.Task[None] | None = None

    async def listen(self) -> None:
        """Subscribes to the engine's subject of adapters and to changes. Follows the desired state from then on.

        Adds the adapters of `--lora-modules` to the desired state. Raises ServiceError if the store does not answer.
        """
        subjects = self._host.subjects
        await self.bind(subjects.engine_adapters(self._host.id, self._host.instance_id), LoadAdapter)
        await self.bind(subjects.adapters(self._model), AdaptersChanged)
        if self._modules:
            loaded = await asyncio.to_thread(self._load_modules)
            state = await self._store.change(self._model, lambda records: _add_modules(records, loaded))
            await self._announce(state)
        await self.sync()

    @handles(LoadAdapter)
    async def on_load(self, envelope: Envelope[LoadAdapter]) -> AdapterLoaded:
        """Reads an adapter into memory. Raises ServiceError if it cannot be served."""
        message = envelope.message
        if self._sleeps:
            raise ServiceError("no_engine", f"The engine {self._host.id} sleeps: wake it, then load the adapter again.")
        found = await asyncio.to_thread(self._load, message.name, message.path)
        log.info("the adapter %s is loaded from %s, rank %d", message.name, message.path, found.rank)
        return AdapterLoaded(message.name, found.version, found.rank, found.num_virtual_tokens)

    @handles(AdaptersChanged)
    async def on_changed(self, envelope: Envelope[AdaptersChanged]) -> None:
        """Follows a change of the desired state."""
        message = envelope.message
        if message.revision != self.revision:
            await self.sync()

    def adapter(self, name: str, version: str) -> LoadedAdapter | Callable[[], LoadedAdapter]:
        """Returns the adapter of a sequence, or a function that reads it into memory (slow; may raise ServiceError).

        Raises AdapterNotHereError if the engine may not have heard of the version yet, ServiceError if the version was
        replaced or unloaded too long ago.
        """
        found = self._library.find(version)
        if found is not None:
            return found
        place = self._paths.get(version)
        if place is None and version in self._retired:
            place = self._retired[version][1]
        if place is not None:
            path = place[1]
            return lambda: self._library.load(name, path, version)
        asked_at = self._looked_for.setdefault(version, self._now())
        if self._synced_at <= asked_at:
            self._sync_soon()
            raise AdapterNotHereError(name)
        del self._looked_for[version]
        message = f"The adapter {name!r} was replaced or unloaded while the request waited. Send the request again."
        raise ServiceError("model_not_found", message, param="model")

    def sleep(self) -> None:
        """The engine sleeps: adapters are not read into memory until `wake`."""
        self._sleeps = True

    async def wake(self, library: AdapterLibrary) -> None:
        """The engine has woken with this library, which may be a new one without what was read into the former one."""
        if library is not self._library:
            self._retired = {version: (until, place, None) for version, (until, place, _) in self._retired.items()}
        self._library, self._sleeps = library, False
        await self.refresh()

    async def sync(self) -> None:
        """Reads the desired state and follows it. Raises ServiceError if the store does not answer."""
        began = self._now()
        state = await self._store.read(self._model)
        if not state.revision and self._records:
            # The stored state was lost: it was in the memory of the NATS server, which has been restarted.
            known = dict(self._records)
            state = await self._store.change(
                self._model, lambda records: records.update(known) if not records else None
            )
            log.warning("the desired state of the adapters was lost and is written again: %d adapters", len(known))
            await self._announce(state)
        self._follow(state)
        if not self._sleeps:
            await asyncio.to_thread(self._load_new, list(self._paths.items()))
        self.revision, self._synced_at = state.revision, began
        self._forget()

    async def refresh(self) -> None:
        """Like `sync`, but if the store does not answer, only logs this. Called periodically."""
        try:
            await self.sync()
        except ServiceError as error:
            log.warning("%s: %s", self.name, error.message)

    def _follow(self, state: AdapterState) -> None:
        paths = {record.version: (record.name, record.path) for record in state.records.values() if not record.removed}
        until = self._now() + limits.ADAPTERS_REPLACED_S
        for version in self._paths.keys() - paths.keys():
            self._retired[version] = until, self._paths[version], self._library.find(version)
        for version in paths:
            self._retired.pop(version, None)
        self._paths, self._records = paths, dict(state.records)

    def _load_new(self, wanted: list[tuple[str, tuple[str, str]]]) -> None:
        """Reads adapters that are not in memory, up to the number that may be kept there. Runs on a thread."""
        for version, (name, path) in wanted[: self._kept]:
            if self._library.find(version) is None:
                try:
                    self._library.load(name, path, version)
                except ServiceError as error:
                    log.error("%s", error.message)

    def _load(self, name: str, path: str) -> LoadedAdapter:
        check_place(path, name, self._roots)
        return self._library.load(name, path)

    def _load_modules(self) -> list[tuple[LoraModule, LoadedAdapter]]:
        return [(module, self._library.load(module.name, module.path)) for module in self._modules]

    def _forget(self) -> None:
        """Drops retired versions whose time is over, and unknown versions that have become known."""
        at = self._now()
        self._retired = {version: kept for version, kept in self._retired.items() if kept[0] > at}
        kept_s = limits.ADAPTERS_REPLACED_S
        self._looked_for = {version: since for version, since in self._looked_for.items() if at - since < kept_s}

    def _sync_soon(self) -> None:
        if self._syncing is None or self._syncing.done():
            self._syncing = asyncio.get_running_loop().create_task(self.refresh())

    async def _announce(self, state: AdapterState) -> None:
        await self.tell(self._host.subjects.adapters(self._model), AdaptersChanged(self._model, state.revision))

    async def on_stop(self) -> None:
        """Ends a reading of the desired state that is under way."""
        if self._syncing is not None:
            self._syncing.cancel()
            await asyncio.gather(self._syncing, return_exceptions=True)

    def _now(self) -> float:
        return self._host.clock.monotonic()


def _add_modules(records: dict[str, AdapterRecord], modules: list[tuple[LoraModule, LoadedAdapter]]) -> None:
    """Adds the adapters of `--lora-modules`.

    Changes that requests have made since take precedence: an adapter that was unloaded is not added again, and one that
    was replaced from another directory is not overwritten.
    """
    for module, adapter in modules:
        known = records.get(module.name)
        follows_flag = known is not None and known.origin == module.path
        if known is not None and follows_flag and (known.removed or known.path != module.path):
            continue
        if known is not None and follows_flag and known.version == adapter.version:
            continue
        records[module.name] = AdapterRecord(
            name=module.name,
            path=module.path,
            version=adapter.version,
            rank=adapter.rank,
            created=now(),
            origin=module.path,
            num_virtual_tokens=adapter.num_virtual_tokens,
        )
