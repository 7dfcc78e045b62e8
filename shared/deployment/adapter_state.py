"""The adapters that every engine of a model should have: the desired state, in a key-value store on the bus.

All adapters of a model are in one entry of the store, so that changes are atomic for readers. Gateways change the entry
when a client loads or unloads an adapter; engines change it when they start with `--lora-modules`. Engines serve the
adapters of the entry, and gateways look up adapter names in it. The revision of the entry changes with every write.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from antiphon.shared import limits
from antiphon.shared.actors.host import Host
from antiphon.shared.bus.key_value import KeyValueStore, StoreUnavailableError
from antiphon.shared.deployment import stores
from antiphon.shared.errors import ServiceError
from antiphon.shared.subjects import model_token

_TRIES_MAX = 20


class AdapterRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One adapter. `version`: hash of its files. `path`: its directory on the machines of the engines."""

    name: str
    path: str
    version: str
    rank: int
    created: int
    """Unix time in seconds."""
    origin: str = ""
    """The path that `--lora-modules` gives for this name; empty if it was loaded by a request alone."""
    removed: bool = False
    """Whether the adapter was unloaded by a request although `--lora-modules` names it: engines that start later must
    not add it again.
    """
    num_virtual_tokens: int = 0
    """For a prompt adapter: number of its virtual tokens, which use part of the context; 0 for a LoRA adapter."""


Records = Mapping[str, AdapterRecord]
"""The adapters of a model by name, removed ones included."""
_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(tuple[AdapterRecord, ...])


@dataclass(frozen=True, slots=True)
class AdapterState:
    """The entry of a model. `revision` is 0 if there is none."""

    revision: int
    records: Records


class AdapterStore:
    """The desired states of all models of a deployment."""

    def __init__(self, host: Host) -> None:
        self._store: KeyValueStore = host.transport.key_value_store(
            stores.adapters(host.subjects), timeout_s=limits.ADAPTER_STORE_TIMEOUT_S
        )

    async def read(self, model: str) -> AdapterState:
        """Returns the state of a model. Raises ServiceError('bus_unavailable') if the store does not answer."""
        try:
            entry = await self._store.get(model_token(model))
        except StoreUnavailableError as error:
            raise _unavailable(error) from error
        if entry is None or not entry.value:
            return AdapterState(0 if entry is None else entry.revision, {})
        return AdapterState(entry.revision, {record.name: record for record in _DECODER.decode(entry.value)})

    async def change(self, model: str, change: Callable[[dict[str, AdapterRecord]], None]) -> AdapterState:
        """Changes the state and returns the new one.

        `change` gets the current records, and may be called several times.

        Writes nothing if `change` changes nothing. Raises what `change` raises, and ServiceError if the store does not
        answer or if there would be too many adapters.
        """
        for _ in range(_TRIES_MAX):
            state = await self.read(model)
            records = dict(state.records)
            change(records)
            if records == state.records:
                return state
            if len(records) > limits.ADAPTERS_MAX:
                message = f"The model {model!r} has {limits.ADAPTERS_MAX} adapters already: unload some of them."
                raise ServiceError("invalid_value", message, param="lora_name")
            try:
                revision = await self._store.replace(
                    model_token(model), _ENCODER.encode(tuple(records.values())), state.revision
                )
            except StoreUnavailableError as error:
                raise _unavailable(error) from error
            if revision is not None:
                return AdapterState(revision, records)
        raise ServiceError("server_is_overloaded", "Too many changes of adapters at once.", retry_after_s=1.0)


def now() -> int:
    """Returns the Unix time in whole seconds, for `AdapterRecord.created`."""
    return int(time.time())


def _unavailable(error: StoreUnavailableError) -> ServiceError:
    message = f"The state of the adapters cannot be read or written: {error}. Does the NATS server have JetStream?"
    return ServiceError("bus_unavailable", message, retry_after_s=1.0)
