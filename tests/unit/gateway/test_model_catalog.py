"""Which models can be used, which one a request means, and what is said of one that cannot serve it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.gateway.path.guest import Guest, Guests
from antiphon.services.gateway.path.models.catalog import ModelCatalog
from antiphon.shared import limits
from antiphon.shared.actors.presence import Members
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import EngineStatus, Heartbeat, PoolStatus, ServiceName, ServiceState, StreamStatus
from tests.support.heartbeats import engine_status, heartbeat

STATUS: dict[ServiceName, Callable[[str], EngineStatus | PoolStatus | StreamStatus]] = {
    "engine": lambda model: engine_status(model, max_model_len=2048, vocab_size=100),
    "tokenizer": lambda model: PoolStatus(model=model),
    "detokenizer": lambda model: StreamStatus(model=model),
}


class Judge(Guest):
    """A guest that lets some engines have no work, by their ids."""

    def __init__(self, world: "World") -> None:
        self.world = world

    def eligible(self, engines: Sequence[Heartbeat]) -> Sequence[Heartbeat]:
        return [beat for beat in engines if beat.id not in self.world.wrong]


class World:
    """Members that are heard at times that the test sets."""

    def __init__(self, default_model: str = "", required_engines: Sequence[str] = ()) -> None:
        self.now = 100.0
        self.members = Members()
        self.wrong: set[str] = set()
        """Ids of engines that get no work."""
        guests = Guests()
        guests.add([Judge(self)])
        self.catalog = ModelCatalog(
            self.members,
            self,
            default_model,
            required_engines=required_engines,
            guests=guests,
        )
        self._sequence = 0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def hear(self, model: str, *services: ServiceName, state: ServiceState = "ready") -> None:
        for service in services or STATUS:
            self._sequence += 1
            name = f"{model}-{service}"
            beat = heartbeat(service, name, "b", STATUS[service](model), state=state, sequence=self._sequence)
            self.catalog.observe(beat)
            self.members.observe(beat, self.now)

    def names(self) -> list[str]:
        return [card.name for card in self.catalog.cards()]

    def meant(self, name: str | None) -> str:
        return self.catalog.resolve(name).name

    def refusal(self, name: str | None) -> tuple[str, int, str]:
        with pytest.raises(ServiceError) as refused:
            self.catalog.resolve(name)
        return refused.value.code, refused.value.status, refused.value.message


def test_every_model_that_has_one_of_each_service_is_listed_and_meant_by_its_name_or_path() -> None:
    world = World()
    world.hear("b")
    world.hear("a")
    assert world.names() == ["a", "b"]
    assert [world.meant(name) for name in ("a", "b", "/models/b")] == ["a", "b", "b"]


@pytest.mark.parametrize("nameless", [None, "", "default"])
def test_without_a_name_a_request_means_the_default_model_or_else_the_first_by_name(nameless: str | None) -> None:
    world, told = World(), World("b")
    for each in (world, told):
        each.hear("b")
        each.hear("a")
    assert world.meant(nameless) == "a"
    assert told.meant(nameless) == "b"
    assert told.names() == ["b", "a"]


def test_a_request_without_a_name_never_goes_to_another_model_than_the_default_one() -> None:
    world = World("b")
    world.hear("a")
    code, status, message = world.refusal(None)
    assert (code, status) == ("no_engine", 503)
    assert message.startswith("No engine and no tokenizer and no detokenizer is ready for the model 'b'")


@pytest.mark.parametrize("lacking", list(STATUS))
@pytest.mark.parametrize("state", ["starting", "draining", ""])
def test_a_model_that_lacks_a_service_is_refused_with_its_name_and_the_others_are_served(
    lacking: ServiceName, state: ServiceState
) -> None:
    world = World()
    world.hear("a")
    others: list[ServiceName] = [service for service in STATUS if service != lacking]
    world.hear("b", *others)
    if state:
        world.hear("b", lacking, state=state)
    assert world.names() == ["a"]
    assert world.refusal("b") == (f"no_{lacking}", 503, f"No {lacking} is ready for the model 'b'. Try again shortly.")
    assert world.meant("a") == "a"
    assert world.catalog.waiting_for() == ""


def test_a_model_that_nobody_serves_does_not_exist() -> None:
    world = World()
    world.hear("a")
    told = "The model 'c' does not exist. Served here: 'a'."
    assert world.refusal("c") == ("model_not_found", 404, told)


def test_while_nothing_can_be_used_no_model_is_said_not_to_exist() -> None:
    world = World()
    assert world.refusal("c")[:2] == ("no_engine", 503)
    assert world.refusal(None)[2] == "No engine is ready yet. Try again shortly."
    world.hear("a", "tokenizer", "detokenizer")
    assert world.refusal("c")[:2] == ("no_engine", 503)
    assert world.refusal("") == ("no_engine", 503, "No engine is ready for the model 'a'. Try again shortly.")


def test_requests_wait_for_a_tokenizer_or_detokenizer_that_was_lost_a_moment_ago_but_not_for_ever() -> None:
    world = World()
    world.hear("a")
    world.now += limits.QUEUE_WAIT_S / 2
    world.hear("a", "engine")
    world.members.expire(world.now)
    assert world.meant("a") == "a"
    assert world.catalog.waiting_for() == "Waiting for: tokenizer, detokenizer."
    world.now += limits.QUEUE_WAIT_S
    world.hear("a", "engine")
    assert world.names() == []
    assert world.refusal("a")[0] == "no_tokenizer"


def test_requests_wait_for_an_engine_that_was_lost_a_moment_ago_but_not_for_ever() -> None:
    world = World()
    world.hear("a")
    world.now += limits.QUEUE_WAIT_S / 2
    world.members.expire(world.now)
    world.hear("b")
    world.hear("a", "tokenizer")
    assert world.meant("a") == "a"
    assert world.names() == ["a", "b"]
    world.now += limits.QUEUE_WAIT_S
    world.members.expire(world.now)
    world.hear("b")
    world.hear("a", "tokenizer")
    assert world.refusal("a")[0] == "no_engine"
    world.now += 2 * limits.QUEUE_WAIT_S
    world.members.expire(world.now)
    world.hear("b")
    assert world.refusal("a")[0] == "model_not_found"


def test_readiness_says_what_is_missing_until_one_model_has_everything() -> None:
    world = World()
    assert world.catalog.waiting_for() == "Waiting for: engine, tokenizer, detokenizer."
    world.hear("a", "tokenizer")
    assert world.catalog.waiting_for() == "Waiting for: engine, detokenizer."
    world.hear("b", "engine")
    assert world.catalog.waiting_for() == "Waiting for: engine, detokenizer; or tokenizer, detokenizer."
    world.hear("b", "tokenizer", "detokenizer")
    assert world.catalog.waiting_for() == ""


def test_a_model_keeps_the_time_at_which_it_was_first_seen() -> None:
    world = World()
    world.hear("a")
    [first] = world.catalog.cards()
    world.now += 10
    world.hear("a")
    assert world.catalog.cards() == [first]


def test_a_model_keeps_the_formats_that_its_tokenizer_announced() -> None:
    world = World()
    world.hear("a")
    assert (world.catalog.resolve("a").tool_format, world.catalog.resolve("a").reasoning_format) == ("", "")
    status = PoolStatus(model="a", tool_format="hermes", reasoning_format="qwen3")
    world.catalog.observe(heartbeat("tokenizer", "t", "b", status, sequence=99))
    world.catalog.observe(heartbeat("tokenizer", "u", "b", PoolStatus(model="a"), state="starting"))
    assert (world.catalog.resolve("a").tool_format, world.catalog.resolve("a").reasoning_format) == ("hermes", "qwen3")


def test_required_engines_are_named_until_each_has_been_ready_once() -> None:
    world = World(required_engines=("a-engine", "b-engine"))
    assert world.catalog.waiting_for() == "Waiting for the instances: a-engine, b-engine."
    world.hear("a")
    world.hear("b", "engine", state="starting")
    assert world.catalog.waiting_for() == "Waiting for the instances: b-engine."
    world.hear("b", "engine")
    assert world.catalog.waiting_for() == ""
    world.now += limits.LEASE_S * 100
    world.hear("a")
    assert world.catalog.waiting_for() == ""


def test_engines_that_get_no_work_do_not_make_a_gateway_ready_and_are_counted() -> None:
    world = World()
    world.hear("a")
    assert world.catalog.waiting_for() == ""
    world.wrong = {"a-engine"}
    assert world.catalog.waiting_for() == (
        "Waiting for: engine. 1 ready engine gets no work: found to compute wrong results."
    )
    assert not world.catalog.is_complete()
    world.hear("b")
    assert world.catalog.waiting_for() == ""  # another model can be served
    world.wrong = {"a-engine", "b-engine"}
    assert world.catalog.waiting_for().endswith(" 2 ready engines get no work: found to compute wrong results.")


EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("hear"),
            st.sampled_from("ab"),
            st.sampled_from(list(STATUS)),
            st.sampled_from(["ready", "draining"]),
        ),
        st.tuples(st.just("pause"), st.sampled_from([0.0, 0.1, limits.LEASE_S, limits.QUEUE_WAIT_S])),
        st.tuples(st.just("distrust"), st.sampled_from(["a-engine", "b-engine"])),
        st.tuples(st.sampled_from(["expire", "suspend", "resume"])),
    ),
    max_size=30,
)


@given(EVENTS)
def test_the_kept_list_of_models_is_always_the_list_that_would_be_made_now(events: list[tuple[Any, ...]]) -> None:
    world = World()
    world.hear("a")
    for event, *arguments in events:
        if event == "hear":
            model, service, state = arguments
            world.hear(model, service, state=state)
        elif event == "pause":
            world.now += arguments[0]
        elif event == "distrust":
            world.wrong.add(arguments[0])
        else:
            getattr(world.members, event)(world.now)
        assert world.catalog.models() == tuple(world.catalog._usable_models())


def test_the_list_of_models_is_made_once_between_two_changes() -> None:
    world = World()
    world.hear("a")
    cards = world.catalog.models()
    assert world.catalog.models() is cards
    world.hear("b")
    assert [card.name for card in world.catalog.models()] == ["a", "b"]
    world.now += limits.QUEUE_WAIT_S + limits.LEASE_S
    assert world.catalog.models() == ()
