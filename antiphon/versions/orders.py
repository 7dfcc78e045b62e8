"""What orders make of the states of models. Pure; the supervisor carries it out."""

import re
from collections.abc import Collection

import msgspec

from antiphon.shared import limits
from antiphon.shared.deployment.model_versions import (
    VERSIONS_MAX,
    ModelState,
    ModelStates,
    ModelVersion,
)
from antiphon.shared.errors import ServiceError

UNLOADED = "unloaded by order"
NAME_OF_VERSION = re.compile(r"@\d+$")
"""Such names the processes of versions have on the bus (`version_name`)."""


def served(states: ModelStates, started: Collection[str]) -> list[str]:
    """Returns the names of the models that are served or being loaded.

    `started`: the models with which the launcher was started.
    """
    changed = {one.name: one.is_served for one in states.models}
    return [name for name in dict.fromkeys((*started, *changed)) if changed.get(name, True)]


def check_load(states: ModelStates, started: Collection[str], name: str) -> None:
    """Raises ServiceError if no further model can be loaded under this name."""
    state, names = states.find(name), served(states, started)
    if state is not None and state.starting is not None and not state.active:
        raise _refusal(f"{name!r} is being loaded already ({state.starting.directory}): wait for it.")
    if name in names:
        raise _refusal(f"{name!r} is served already. Start another version of it: antiphon models set {name}=DIR")
    if NAME_OF_VERSION.search(name):
        raise _refusal(f"{name!r} ends like the name of a version: choose another one.")
    if len(names) >= limits.MODELS_MAX:
        raise _refusal(f"{len(names)} models are served, and no more can be: unload one first.")


def check_unload(states: ModelStates, started: Collection[str], name: str) -> None:
    """Raises ServiceError if this is the only model: a server serves at least one."""
    if served(states, started) == [name]:
        raise _refusal(f"{name!r} is the only model here: load another one first, or stop the server.")


def loading(state: ModelState | None, name: str, version: ModelVersion, settings: bytes) -> ModelState:
    """Returns the state of a model while its first version starts. `state`: an earlier one of an unloaded model.

    The numbers of versions continue, so that no processes have a name on the bus that others had.
    """
    versions = () if state is None else state.versions
    return with_version(ModelState(name=name, active=0, versions=versions, settings=settings), version)


def unloaded(state: ModelState) -> ModelState:
    """Returns the state of a model that gets no requests any more. Its versions end when they are unused."""
    return msgspec.structs.replace(state, active=0, former=0)


def taken_back(state: ModelState, directory: str, created: int) -> ModelState:
    """Returns the state of an unloaded model when a launcher starts with it again."""
    version = ModelVersion(number=1, directory=directory, state="ready", created=created)
    ended = (one for one in state.versions if one.state in ("failed", "ended"))
    return with_version(ModelState(name=state.name, active=1, versions=tuple(ended)), version)


def next_number(state: ModelState | None) -> int:
    """Returns the number of the next version of a model."""
    return 1 + max((one.number for one in state.versions), default=0) if state is not None else 1


def with_version(state: ModelState, version: ModelVersion) -> ModelState:
    """Returns the state with this version added or changed; the oldest ended ones are dropped beyond VERSIONS_MAX."""
    versions = [one for one in state.versions if one.number != version.number]
    versions = sorted([*versions, version], key=lambda one: one.number)
    over = [one for one in versions if one.state in ("failed", "ended")][: max(0, len(versions) - VERSIONS_MAX)]
    return msgspec.structs.replace(state, versions=tuple(one for one in versions if one not in over))


def _refusal(message: str) -> ServiceError:
    return ServiceError("invalid_value", message, param="model")
