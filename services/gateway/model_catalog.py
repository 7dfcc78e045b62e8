"""The models that can be used now, what the others lack, and which model a request means. Knows only heartbeats.

A model can be used when it has an engine, a tokenizer and a detokenizer that are ready. If its last tokenizer or
detokenizer was lost less than `QUEUE_WAIT_S` ago it still can: requests wait for the next one. The gateway's actor
feeds it heartbeats and asks it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from services.gateway.generation import ModelCard
from services.gateway.requests.router import model_of, served_configurations, served_models
from shared import limits
from shared.actors.presence import Members
from shared.clock import Clock
from shared.errors import ServiceError
from shared.messages import EngineStatus, Heartbeat

SERVICES = ("engine", "tokenizer", "detokenizer")
"""What a model needs one of each."""
RETRY_AFTER_S = 1.0
"""What a client is told to wait before it asks a busy server again."""
_NO_NAME = ("", "default")


class ModelCatalog:
    """`default_model` is the served name that requests without a model mean; empty: the first one that can be used.

    `judging_time`: the moment at which leases are judged, monotonic seconds (default: now).
    """

    def __init__(
        self, members: Members, clock: Clock, default_model: str = "", judging_time: Callable[[], float] | None = None
    ) -> None:
        self._members = members
        self._clock = clock
        self._now = judging_time or clock.monotonic
        self._default = default_model
        self._ready_at: dict[tuple[str, str], float] = {}
        self._created: dict[str, int] = {}

    def observe(self, beat: Heartbeat) -> None:
        """Takes in a heartbeat of one of SERVICES."""
        if beat.state == "ready":
            self._ready_at[beat.service, model_of(beat)] = self._now()

    def cards(self) -> list[ModelCard]:
        """The models that can be used, the default one first, the others by name."""
        engines = self._members.alive("engine", self._now())
        served = served_models(engines)
        usable = self._ready(recent=True)
        names = sorted(served, key=lambda name: (name != self._default, name))
        return [
            self._card(name, served[name], served_configurations(engines, name))
            for name in names
            if not _missing(name, usable)
        ]

    def resolve(self, name: str | None) -> ModelCard:
        """The model that a request means by a served name, a path, an alias, or no name. Raises ServiceError.

        Without a name it is the default model or, where none is set, the first by name that can be used.
        """
        cards = self.cards()
        wanted = wanted_name(name, self._default)
        card = find_model(cards, wanted)
        if card is None:
            raise self._refusal(wanted, cards)
        return card

    def waiting_for(self) -> str:
        """Empty when at least one model has everything now; else what is missing, without the models' names."""
        ready = self._ready(recent=False)
        lacks = [_missing(model, ready) for model in self._known()] or [list(SERVICES)]
        if not all(lacks):
            return ""
        return f"Waiting for: {'; or '.join(dict.fromkeys(map(', '.join, lacks)))}."

    def is_complete(self) -> bool:
        """Whether every model of which something was heard has one of each service."""
        ready, known = self._ready(recent=False), self._known()
        return bool(known) and not any(_missing(model, ready) for model in known)

    def _ready(self, *, recent: bool) -> dict[str, set[str]]:
        """The models that have a ready member of each service. `recent`: or had one not long ago, engines excepted."""
        now = self._now()
        self._ready_at = {key: at for key, at in self._ready_at.items() if now - at <= limits.QUEUE_WAIT_S}
        ready = {
            service: {model_of(beat) for beat in self._members.alive(service, now) if beat.state == "ready"}
            for service in SERVICES
        }
        for service, model in self._ready_at if recent else ():
            if service != "engine":
                ready[service].add(model)
        return ready

    def _known(self) -> list[str]:
        """Names of all models of which some service is alive or was ready not long ago."""
        now = self._now()
        alive = {model_of(beat) for service in SERVICES for beat in self._members.alive(service, now)}
        return sorted(alive | {model for _, model in self._ready_at})

    def _refusal(self, wanted: str, cards: list[ModelCard]) -> ServiceError:
        known = self._known()
        if not wanted and len(known) == 1:
            wanted = known[0]
        if wanted and (wanted in known or wanted == self._default):
            lacks = _missing(wanted, self._ready(recent=True))
            told = f"No {' and no '.join(lacks)} is ready for the model {wanted!r}. Try again shortly."
            return ServiceError(f"no_{lacks[0]}", told, retry_after_s=RETRY_AFTER_S)
        return unknown_model(cards, wanted)

    def _card(self, name: str, status: EngineStatus, configuration: tuple[str, ...]) -> ModelCard:
        created = self._created.setdefault(name, self._clock.time_ns() // 1_000_000_000)
        return ModelCard(
            name,
            status.model_path,
            status.max_model_len,
            status.vocab_size,
            created,
            aliases=status.model_aliases,
            configuration=configuration,
        )


def wanted_name(name: str | None, default_model: str = "") -> str:
    """The name in a request; the default model's where it has none."""
    return default_model if name is None or name in _NO_NAME else name


def find_model(cards: Sequence[ModelCard], name: str) -> ModelCard | None:
    """The model of a served name, a path or an alias, looked for in this order; without a name the first one."""
    if not name:
        return cards[0] if cards else None
    for card in cards:
        if name == card.name:
            return card
    for card in cards:
        if name == card.path:
            return card
    for card in cards:
        if name in card.aliases:
            return card
    return None


def unknown_model(cards: Sequence[ModelCard], name: str) -> ServiceError:
    """What is said of a name that none of the models has."""
    if not cards:
        told = "No engine is ready yet. Try again shortly."
        return ServiceError("no_engine", told, retry_after_s=RETRY_AFTER_S)
    names = ", ".join(repr(card.name) for card in cards)
    return ServiceError("model_not_found", f"The model {name!r} does not exist. Served here: {names}.", param="model")


def _missing(model: str, ready: Mapping[str, Collection[str]]) -> list[str]:
    """Services of which the model has no ready member."""
    return [service for service in SERVICES if model not in ready[service]]
