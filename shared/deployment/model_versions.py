"""The versions of the models of a deployment: the desired state, in a key-value store on the bus.

A version is a set of processes with its own bus name (`version_name`), so requests, streams and recovery stay within
one version. Clients know only the model's name; gateways send new requests to the active version. The launcher that
starts the processes is the only writer of a model's state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from antiphon.shared import limits
from antiphon.shared.actors.host import Host
from antiphon.shared.bus.key_value import KeyValueStore
from antiphon.shared.deployment import stores

VERSIONS_MAX = 16
"""Maximum number of listed versions of a model; the oldest ended versions are dropped."""
_KEY = "models"
VersionState = Literal["starting", "ready", "failed", "ended"]
"""`ready`: its processes run, whether it is active or not. `ended`: they were stopped."""


class ModelVersion(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One version of a model. `number` counts from 1, the version with which the launcher was started."""

    number: int
    directory: str
    state: VersionState
    created: int
    """Unix time in seconds."""
    reason: str = ""
    """Why it failed or ended."""
    share: float = 0.0
    """For a shadow version: the share of the requests that it computes copies of, above 0. Such a version is never
    active.
    """


class ModelState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The versions of one model.

    `active`: number of the version that gets new requests; 0: none, because the model is being loaded or was unloaded.
    `former`: number of the active version before it. `settings`: a JSON object with the settings of a model that was
    loaded by an order, as in a file of models; empty for a model with which a launcher was started.
    """

    name: str
    active: int
    versions: tuple[ModelVersion, ...]
    former: int = 0
    settings: bytes = b""

    def version(self, number: int) -> ModelVersion | None:
        """Returns a version by its number."""
        return next((one for one in self.versions if one.number == number), None)

    @property
    def starting(self) -> ModelVersion | None:
        """The version that is starting."""
        return next((one for one in self.versions if one.state == "starting"), None)

    @property
    def is_served(self) -> bool:
        """Whether the model gets requests, or will when it is loaded."""
        return self.active > 0 or self.starting is not None

    @property
    def shadow(self) -> ModelVersion | None:
        """The shadow version, if one is ready."""
        return next((one for one in self.versions if one.share > 0 and one.state == "ready"), None)


class ModelStates(msgspec.Struct, frozen=True, array_like=True):
    """The states of all models with more than one version. `changes` is incremented with every change."""

    changes: int = 0
    models: tuple[ModelState, ...] = ()

    def find(self, name: str) -> ModelState | None:
        """Returns the state of a model; None if it has only the version that it was started with."""
        return next((one for one in self.models if one.name == name), None)

    def replaced(self, model: ModelState) -> "ModelStates":
        """Returns the states after a change of one model. Of unloaded models the latest are remembered."""
        models = [*(one for one in self.models if one.name != model.name), model]
        unloaded = [one for one in models if not one.is_served]
        forgotten = unloaded[: -limits.UNLOADED_MODELS_MAX]
        return ModelStates(self.changes + 1, tuple(one for one in models if one not in forgotten))


ENCODER, DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ModelStates)


def version_name(name: str, number: int) -> str:
    """Returns the bus name of a version's processes; the bus name of the first version is the model's name itself."""
    return name if number == 1 else f"{name}@{number}"


def routed(states: ModelStates) -> Mapping[str, str]:
    """Returns for each model with versions the bus name of its active version."""
    return {one.name: version_name(one.name, one.active) for one in states.models}


def hidden(states: ModelStates) -> frozenset[str]:
    """Returns the bus names of all inactive versions, which requests cannot name."""
    every = {version_name(one.name, version.number) for one in states.models for version in one.versions}
    return frozenset(every - set(routed(states).values()))


@dataclass(slots=True)
class VersionStore:
    """Reads and writes the store's entry with the versions of all models."""

    host: Host
    _store: KeyValueStore = field(init=False)

    def __post_init__(self) -> None:
        self._store = self.host.transport.key_value_store(
            stores.models(self.host.subjects), timeout_s=limits.ADAPTER_STORE_TIMEOUT_S
        )

    async def read(self) -> ModelStates:
        """Returns the states; empty ones if there is no entry. Raises StoreUnavailableError."""
        entry = await self._store.get(_KEY)
        return DECODER.decode(entry.value) if entry is not None and entry.value else ModelStates()

    async def write(self, states: ModelStates) -> None:
        """Writes the states unless the store has later ones. Raises StoreUnavailableError."""
        while True:
            entry = await self._store.get(_KEY)
            known = DECODER.decode(entry.value) if entry is not None and entry.value else ModelStates()
            if known.changes >= states.changes:
                return
            revision = 0 if entry is None else entry.revision
            if await self._store.replace(_KEY, ENCODER.encode(states), revision) is not None:
                return
