"""What orders make of the states of models."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.shared import limits
from antiphon.shared.deployment.model_versions import (
    VERSIONS_MAX,
    ModelState,
    ModelStates,
    ModelVersion,
    VersionState,
    hidden,
    routed,
    version_name,
)
from antiphon.shared.errors import ServiceError
from antiphon.versions import orders

STARTED = ("tiny",)


def version(number: int, state: VersionState = "ready", directory: str = "/m") -> ModelVersion:
    return ModelVersion(number=number, directory=directory, state=state, created=0)


def loaded(states: ModelStates, name: str) -> ModelStates:
    """The states when a model was loaded and serves."""
    orders.check_load(states, STARTED, name)
    state = states.find(name)
    number = orders.next_number(state)
    state = orders.loading(state, name, version(number, "starting"), b"{}")
    state = orders.with_version(state, version(number))
    return states.replaced(msgspec.structs.replace(state, active=number))


def unloaded(states: ModelStates, name: str) -> ModelStates:
    """The states when a model was unloaded and its processes have ended."""
    orders.check_unload(states, STARTED, name)
    state = states.find(name)
    assert state is not None
    state = orders.unloaded(state)
    for one in state.versions:
        state = orders.with_version(state, msgspec.structs.replace(one, state="ended"))
    return states.replaced(state)


def refused(states: ModelStates, name: str) -> str:
    with pytest.raises(ServiceError) as error:
        orders.check_load(states, STARTED, name)
    return error.value.message


def test_a_model_that_is_being_loaded_is_neither_routed_nor_loaded_twice() -> None:
    state = orders.loading(None, "other", version(1, "starting", "/models/other"), b"{}")
    states = ModelStates().replaced(state)
    assert orders.served(states, STARTED) == ["tiny", "other"]
    assert hidden(states) == {"other"}
    assert "being loaded already (/models/other)" in refused(states, "other")
    failed = states.replaced(orders.with_version(state, version(1, "failed")))
    assert orders.served(failed, STARTED) == ["tiny"]
    orders.check_load(failed, STARTED, "other")


def test_a_model_that_is_loaded_again_has_processes_with_another_name() -> None:
    states = unloaded(loaded(ModelStates(), "other"), "other")
    assert hidden(states) == {"other"}
    states = loaded(states, "other")
    assert (routed(states), hidden(states)) == ({"other": "other@2"}, {"other"})
    assert "served already. Start another version" in refused(states, "other")
    assert "served already. Start another version" in refused(states, "tiny")


def test_no_model_is_called_like_a_version_of_another_one() -> None:
    assert version_name("tiny", 2) == "tiny@2"
    assert "ends like the name of a version" in refused(ModelStates(), "tiny@2")
    orders.check_load(ModelStates(), STARTED, "org/other@main")


def test_the_last_model_cannot_be_unloaded_but_any_other_one_can() -> None:
    with pytest.raises(ServiceError, match="'tiny' is the only model here"):
        orders.check_unload(ModelStates(), STARTED, "tiny")
    orders.check_unload(ModelStates(), ("tiny", "small"), "tiny")
    states = loaded(ModelStates(), "other")
    first = orders.unloaded(ModelState(name="tiny", active=1, versions=(version(1),)))
    states = states.replaced(first)
    assert orders.served(states, STARTED) == ["other"]
    with pytest.raises(ServiceError, match="'other' is the only model here"):
        orders.check_unload(states, STARTED, "other")


def test_a_launcher_that_starts_with_an_unloaded_model_serves_its_first_version_again() -> None:
    left = ModelState(name="tiny", active=0, versions=(version(1, "ended"), version(2), version(3, "failed")))
    state = orders.taken_back(left, "/models/tiny", 7)
    assert (state.active, [(one.number, one.state) for one in state.versions]) == (1, [(1, "ready"), (3, "failed")])
    assert state.settings == b""


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=120))
def test_states_are_bounded_and_remember_the_latest_unloaded_models(changes: list[tuple[bool, int]]) -> None:
    states, there = ModelStates(), set[str]()
    for is_load, number in changes:
        name, before = f"model-{number}", states.changes
        try:
            states = loaded(states, name) if is_load else unloaded(states, name) if name in there else states
        except ServiceError:
            assert name in there or len(there) + 1 == limits.MODELS_MAX
            continue
        if states.changes > before:
            (there.add if is_load else there.discard)(name)
        state = states.find(name)
        assert state is None or len(state.versions) <= VERSIONS_MAX
    assert set(orders.served(states, STARTED)) == {"tiny", *there}
    assert len(there) < limits.MODELS_MAX
    assert sum(not one.is_served for one in states.models) <= limits.UNLOADED_MODELS_MAX
    assert {one.name for one in states.models if one.is_served} == there
