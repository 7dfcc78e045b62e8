"""The adapters of all models that one gateway knows; loads and unloads adapters.

An adapter is loaded in three steps. First every engine of the model reads it into memory. Then the gateway writes the
desired state (the list of adapters in the key-value store); from now on requests may name the adapter. Last, engines
and other gateways are notified. So no request can name an adapter that an engine has not read yet, and an engine that
starts meanwhile finds the adapter in the desired state. A replaced adapter gets another version, and requests keep the
version that they began with.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard
from antiphon.services.gateway.path.guest import Guest
from antiphon.shared import limits
from antiphon.shared.actors.actor import Envelope, ask, handles
from antiphon.shared.blocks import adapter_salt
from antiphon.shared.bus.transport import NoRespondersError, RequestTimeoutError
from antiphon.shared.codec import Decoder, encode
from antiphon.shared.config import GatewaySettings
from antiphon.shared.deployment.adapter_state import AdapterRecord, AdapterState, AdapterStore, Records, now
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import AdapterLoaded, AdaptersChanged, EngineStatus, ErrorReply, Heartbeat, LoadAdapter
from antiphon.shared.models.adapters import name_error

log = logging.getLogger(__name__)
_LOADED = Decoder([AdapterLoaded, ErrorReply])
_NONE = AdapterState(0, {})


class AdapterDirectory(Guest):
    """The adapters of the models that engines serve."""

    def __init__(self, gateway: GatewayActor) -> None:
        self._gateway, self._host, self._members = gateway, gateway.host, gateway.members
        self._store = AdapterStore(self._host)
        self._states: dict[str, AdapterState] = {}
        self._reading: dict[str, asyncio.Task[None]] = {}

    async def listen(self) -> None:
        """See Guest."""
        await self._gateway.bind(self._host.subjects.all_adapters(), AdaptersChanged)

    def admit(self, request: GenerationRequest, card: ModelCard) -> GenerationRequest:
        """See Guest. The adapter's version is resolved once: the request keeps it if the adapter is replaced."""
        if not card.adapter_version:
            return request
        return msgspec.structs.replace(request, cache_salt=adapter_salt(request.cache_salt, card.adapter_version))

    def cards(self, model: ModelCard) -> Sequence[ModelCard]:
        """See Guest."""
        records = self.of(model.served_by)
        return [_card(model, records[name]) for name in sorted(records) if not records[name].removed]

    def find_card(self, model: ModelCard, name: str) -> ModelCard | None:
        """See Guest."""
        record = self.find(model.served_by, name)
        return None if record is None else _card(model, record)

    def of(self, model: str) -> Records:
        """Returns the adapters of a model by name, removed ones included."""
        return self._states.get(model, _NONE).records

    def find(self, model: str, name: str) -> AdapterRecord | None:
        """Returns the adapter of a model with this name; None if there is none."""
        record = self.of(model).get(name)
        return None if record is None or record.removed else record

    def is_settled(self) -> bool:
        """See Guest: whether this gateway has read the adapter lists of all models."""
        return all(
            beat.status.adapters_revision <= 0 or beat.status.model in self._states
            for beat in self._engines()
            if isinstance(beat.status, EngineStatus)
        )

    def on_heartbeat(self, beat: Heartbeat) -> None:
        """See Guest. Reads a model's adapters if an engine names a newer revision of the list than this gateway."""
        status = beat.status
        if isinstance(status, EngineStatus) and status.adapters_revision > self._revision(status.model):
            self._read_soon(status.model)

    @handles(AdaptersChanged)
    def on_adapters_changed(self, envelope: Envelope[AdaptersChanged]) -> None:
        """Reads the adapters of a model after another process has changed them."""
        message = envelope.message
        # A lower revision than the known one means that the store was recreated.
        if message.revision != self._revision(message.model):
            self._read_soon(message.model)

    async def load(self, name: str, path: str, base: str, *, in_place: bool) -> None:
        """Loads an adapter on all engines of the model `base` and lets requests name it.

        `in_place`: an adapter with the same name is replaced. Raises ServiceError if the name is taken or invalid, if
        an engine cannot serve the adapter, or if an engine does not answer.
        """
        engines = self._engines_with_adapters(base)
        if why := name_error(name):
            raise ServiceError("invalid_value", f"'lora_name' {why}.", param="lora_name")
        if not path or len(path) > limits.ADAPTER_PATH_CHARS_MAX:
            reason = f"'lora_path' must have between 1 and {limits.ADAPTER_PATH_CHARS_MAX} characters."
            raise ServiceError("invalid_value", reason, param="lora_path")
        self._check_free(name, base)
        state = await self._store.read(base)
        if not in_place:
            _check_new(state.records, name)
        replies = await asyncio.gather(*(self._load_on(engine, name, path) for engine in engines))
        versions = {reply.version for reply in replies}
        if len(versions) > 1:
            reason = f"The engines read different files from {path}: give a directory that is the same on all machines."
            raise ServiceError("invalid_value", reason, param="lora_path")

        def add(records: dict[str, AdapterRecord]) -> None:
            if not in_place:
                _check_new(records, name)
            known = records.get(name)
            origin = "" if known is None else known.origin
            records[name] = AdapterRecord(
                name=name,
                path=path,
                version=replies[0].version,
                rank=replies[0].rank,
                created=now(),
                origin=origin,
                num_virtual_tokens=replies[0].num_virtual_tokens,
            )

        await self._take(base, await self._store.change(base, add))
        log.info("the adapter %s of %s is loaded from %s", name, base, path)

    async def unload(self, name: str, models: Sequence[str]) -> None:
        """Unloads an adapter of one of the models. Running requests finish with it.

        Raises ServiceError('not_found') if none of the models has such an adapter.
        """
        for model in models:
            if self.find(model, name) is None:
                await self._read_again(model)
            if self.find(model, name) is not None:
                await self._take(model, await self._store.change(model, lambda records: _remove(records, name)))
                log.info("the adapter %s of %s is unloaded", name, model)
                return
        raise ServiceError("not_found", f"The LoRA adapter '{name}' cannot be found.", param="lora_name")

    async def _load_on(self, engine: Heartbeat, name: str, path: str) -> AdapterLoaded:
        subject = self._host.subjects.engine_adapters(engine.id, engine.instance_id)
        try:
            reply = await ask(
                self._host.transport,
                subject,
                LoadAdapter(name, path),
                _LOADED,
                timeout_s=limits.ADAPTER_LOAD_TIMEOUT_S,
            )
        except (NoRespondersError, RequestTimeoutError) as error:
            message = f"The engine {engine.id} does not answer. The adapter {name!r} was not loaded: try again shortly."
            raise ServiceError("no_engine", message, retry_after_s=1.0) from error
        assert isinstance(reply, AdapterLoaded)
        return reply

    async def _take(self, model: str, state: AdapterState) -> None:
        """Applies a state that this gateway has written, and notifies the other processes."""
        self._states[model] = state
        message = AdaptersChanged(model, state.revision)
        await self._host.transport.publish(self._host.subjects.adapters(model), encode(message))

    def _revision(self, model: str) -> int:
        return self._states.get(model, _NONE).revision

    def _read_soon(self, model: str) -> None:
        task = self._reading.get(model)
        if task is None or task.done():
            self._reading[model] = asyncio.get_running_loop().create_task(self._read_again(model))

    async def _read_again(self, model: str) -> None:
        try:
            self._states[model] = await self._store.read(model)
        except ServiceError as error:
            # It is tried again at the next heartbeat of an engine.
            log.warning("the adapters of %s are not known: %s", model, error.message)

    def _engines_with_adapters(self, base: str) -> list[Heartbeat]:
        found = [
            beat
            for beat in self._engines()
            if isinstance(beat.status, EngineStatus) and beat.status.model == base and beat.state == "ready"
        ]
        if not found:
            raise ServiceError("no_engine", f"No engine is ready for the model {base!r}.", retry_after_s=1.0)
        if any(isinstance(beat.status, EngineStatus) and beat.status.adapters_revision < 0 for beat in found):
            message = f"The engines of the model {base!r} serve no adapters: start them with --enable-lora."
            raise ServiceError("unsupported_parameter", message, param="lora_name")
        return found

    def _check_free(self, name: str, base: str) -> None:
        """Raises ServiceError if a model, or an adapter of another model, already has this name."""
        for beat in self._engines():
            status = beat.status
            if isinstance(status, EngineStatus) and name in (status.model, status.model_path, *status.model_aliases):
                message = f"A model is called {name!r}: give the adapter another name."
                raise ServiceError("invalid_value", message, param="lora_name")
        for model in self._states:
            if model != base and self.find(model, name) is not None:
                message = f"The model {model!r} has an adapter {name!r}: give this one another name."
                raise ServiceError("invalid_value", message, param="lora_name")

    def _engines(self) -> Sequence[Heartbeat]:
        return self._members.alive("engine", self._host.clock.monotonic())


def _card(model: ModelCard, record: AdapterRecord) -> ModelCard:
    return replace(
        model,
        name=record.name,
        path=record.path,
        created=record.created,
        aliases=(),
        base=model.name,
        adapter_version=record.version,
        max_model_len=model.max_model_len - record.num_virtual_tokens,
    )


def _check_new(records: Records, name: str) -> None:
    known = records.get(name)
    if known is not None and not known.removed:
        message = (
            f"The LoRA adapter '{name}' has already been loaded. Unload it first, or replace it with "
            "'load_inplace': true."
        )
        raise ServiceError("invalid_value", message, param="lora_name")


def _remove(records: dict[str, AdapterRecord], name: str) -> None:
    record = records.pop(name, None)
    if record is not None and record.origin:
        records[name] = msgspec.structs.replace(record, removed=True)


def make(gateway: GatewayActor, settings: GatewaySettings) -> AdapterDirectory:
    """See `guests.make_guests`."""
    return AdapterDirectory(gateway)
