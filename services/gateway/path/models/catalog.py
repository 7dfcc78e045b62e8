"""Determines from heartbeats which models can be used, which services the others lack, and which one a request names.

A model can be used if it has an engine, a tokenizer and a detokenizer that are ready, where an engine may also sleep,
because its requests wake it or wait until it wakes. A model that lost the last member
of a service less than `QUEUE_WAIT_S` ago can still be used: its requests wait for a new one. Called by the gateway's
actor.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import repeat
from operator import attrgetter

from antiphon.services.gateway.path.generation import ModelCard
from antiphon.services.gateway.path.guest import Guests
from antiphon.services.gateway.path.models.versions import VersionDirectory
from antiphon.services.gateway.path.router import model_of, served_configurations, served_models, serves
from antiphon.shared import limits
from antiphon.shared.actors.presence import Members
from antiphon.shared.clock import Clock
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import EngineStatus, Heartbeat, PoolStatus

SERVICES = ("engine", "tokenizer", "detokenizer")
"""A model needs at least one member of each of these services."""
VISION = "vision"
"""The additional service of a model that accepts images; requests without images do not need it."""
RETRY_AFTER_S = 1.0
"""Time after which a refused client may try again, in seconds."""
MEMBERS_MAX = 4096
"""Members of which the facts of the last heartbeat are kept; above, all are forgotten, and the cards made again."""
_INSTANCE = attrgetter("instance_id")
_NO_NAME = ("", "default")


class ModelCatalog:
    """The models of one gateway.

    `default_model`: served name of the model for requests that name none; if empty, the first usable model by name.
    `judging_time` returns the time at which leases are judged, in monotonic seconds (default: now). `required_engines`:
    ids of engines that must each have been ready once before the gateway counts as ready. `guests` tell which engines
    may get work, and what a model serves besides itself.
    """

    def __init__(
        self,
        members: Members,
        clock: Clock,
        default_model: str = "",
        judging_time: Callable[[], float] | None = None,
        required_engines: Sequence[str] = (),
        versions: VersionDirectory | None = None,
        guests: Guests | None = None,
    ) -> None:
        self._members = members
        self._guests = guests or Guests()
        self._trusted = self._guests.eligible
        self._versions = versions
        self._clock = clock
        self._now = judging_time or clock.monotonic
        self._default = default_model
        self._required = dict.fromkeys(required_engines)
        self._ready_at: dict[tuple[str, str], float] = {}
        self._forget_after = math.inf
        """Lower bound of the time at which an entry of `_ready_at` is dropped."""
        self._last_engine: dict[str, Heartbeat] = {}
        """By model: the last heartbeat of a ready engine. Kept as long as the entry of `_ready_at`."""
        self._created: dict[str, int] = {}
        self._sees: set[str] = set()
        """Models that accept images and whose image service has been ready."""
        self._formats: dict[str, tuple[str, str]] = {}
        """By model: the formats of tool calls and reasoning that its tokenizer announced last."""
        self._told: dict[tuple[str, str], tuple[object, ...]] = {}
        """By service and id of a member: what its last heartbeat told of its model (`_facts_of`)."""
        self._changes = 0
        """Number of changes in `_told`, and of the keys of `_ready_at`."""
        self._basis: tuple[object, ...] = ()
        self._models: tuple[ModelCard, ...] = ()
        """The last result of `models`, and all that it depends on."""

    def observe(self, beat: Heartbeat) -> None:
        """Records a heartbeat of a member of one of SERVICES, or of an image service."""
        key, facts = (beat.service, beat.id), _facts_of(beat)
        if self._told.get(key) != facts:
            if len(self._told) >= MEMBERS_MAX:
                self._told.clear()
            self._told[key] = facts
            self._changes += 1
        if isinstance(beat.status, PoolStatus) and beat.state == "ready":
            self._formats[beat.status.model] = (beat.status.tool_format, beat.status.reasoning_format)
        if serves(beat) and beat.service == VISION:
            self._sees.add(model_of(beat))
        elif serves(beat):
            if beat.service == "engine":
                self._required.pop(beat.id, None)
                self._last_engine[model_of(beat)] = beat
            self._changes += (beat.service, model_of(beat)) not in self._ready_at
            self._ready_at[beat.service, model_of(beat)] = now = self._now()
            self._forget_after = min(self._forget_after, now + limits.QUEUE_WAIT_S)

    def cards(self) -> list[ModelCard]:
        """Returns everything that requests can name: the default model, the other models by name, then adapters."""
        models = self.models()
        return [*models, *(card for model in models for card in self._guests.cards(model))]

    def models(self) -> tuple[ModelCard, ...]:
        """Returns the models that can be used, without their adapters, in the order of `cards`.

        Called for each request, so the cards are made again only if what heartbeats tell of the models, the living
        members, or the versions have changed.
        """
        now = self._now()
        if now > self._forget_after:
            self._forget(now)
        alive = [*map(self._members.alive, SERVICES, repeat(now))]
        trusted = self._trusted(alive[0])
        living = [*map(_INSTANCE, [*alive[0], *alive[1], *alive[2]])]
        judged = None if trusted is alive[0] else [*map(_INSTANCE, trusted)]
        basis = (self._changes, living, judged, None if self._versions is None else self._versions.states)
        if basis != self._basis:
            self._models, self._basis = tuple(self._usable_models()), basis
        return self._models

    def _usable_models(self) -> list[ModelCard]:
        usable = self._ready(recent=True)
        engines = self._engines()
        served = served_models(engines)
        cards = [
            self._card(name, served[name], served_configurations(engines, name))
            for name in served
            if self._public(name) is not None and not _missing(name, usable)
        ]
        return sorted(cards, key=lambda card: (card.name != self._default, card.name))

    def find_on_bus(self, internal: str) -> ModelCard | None:
        """Returns the model whose members have this bus name, also a version that requests cannot name."""
        usable = self._ready(recent=True)
        engines = self._engines()
        status = served_models(engines).get(internal)
        if status is None or _missing(internal, usable):
            return None
        return self._card(internal, status, served_configurations(engines, internal))

    def resolve(self, name: str | None) -> ModelCard:
        """Returns the model or adapter that a request names: a model by served name, path or alias, an adapter by name.

        Raises ServiceError if there is none.

        Without a name it is the default model or, if none is set, the first usable model by name.
        """
        cards = self.models()
        wanted = self._default if name is None or name in _NO_NAME else name
        card = find_model(cards, wanted) or self._find_further(cards, wanted)
        if card is None:
            raise self._refusal(wanted, cards)
        return card

    def waiting_for(self) -> str:
        """Returns '' if at least one model has a ready member of each service now; else the missing services.

        Engines that get no work because they compute wrong results do not count; the sentence has their number. The
        sentence has no names of models. Required engines that have not been ready yet come first.
        """
        if self._required:
            return f"Waiting for the instances: {', '.join(self._required)}."
        ready = self._ready(recent=False)
        lacks = [_missing(model, ready) + self._unseeing(model) for model in self._known()] or [list(SERVICES)]
        if not all(lacks):
            return ""
        return f"Waiting for: {'; or '.join(dict.fromkeys(map(', '.join, lacks)))}.{self._distrusted()}"

    def _distrusted(self) -> str:
        """Returns a sentence on the ready engines that get no work, preceded by a space; '' if there is none."""
        alive = self._members.alive("engine", self._now())
        trusted = {beat.id for beat in self._trusted(alive)}
        count = sum(beat.state == "ready" and beat.id not in trusted for beat in alive)
        if not count:
            return ""
        return (
            f" {count} ready {'engine gets' if count == 1 else 'engines get'} no work: found to compute wrong results."
        )

    def is_complete(self) -> bool:
        """Whether at least one model is known and each known model has a ready member of each service."""
        ready, known = self._ready(recent=False), self._known()
        return bool(known) and not any(_missing(model, ready) or self._unseeing(model) for model in known)

    def _unseeing(self, model: str) -> list[str]:
        """Returns the image service if the model needs one and has had none yet. Until then, only text is served."""
        engines = self._members.alive("engine", self._now())
        status = served_models(engines).get(model)
        return [VISION] if status is not None and status.takes_images and model not in self._sees else []

    def _ready(self, *, recent: bool) -> dict[str, set[str]]:
        """Returns, by service, the models that have a ready member.

        `recent`: also models that had a ready member in the last QUEUE_WAIT_S. Engines that have computed wrong results
        do not count.
        """
        now = self._now()
        self._forget(now)
        alive: dict[str, Sequence[Heartbeat]] = {service: self._members.alive(service, now) for service in SERVICES}
        alive["engine"] = self._trusted(alive["engine"])
        ready = {service: {model_of(beat) for beat in members if serves(beat)} for service, members in alive.items()}
        for service, model in self._ready_at if recent else ():
            ready[service].add(model)
        return ready

    def _engines(self) -> list[Heartbeat]:
        """Returns the running engines and, for each model without a ready engine, the one that was ready last."""
        alive = self._members.alive("engine", self._now())
        served = served_models(alive)
        return [*alive, *(engine for model, engine in self._last_engine.items() if model not in served)]

    def _forget(self, now: float) -> None:
        if now <= self._forget_after:
            return
        self._ready_at = {key: at for key, at in self._ready_at.items() if now - at <= limits.QUEUE_WAIT_S}
        self._forget_after = min(self._ready_at.values(), default=math.inf) + limits.QUEUE_WAIT_S
        self._changes += 1
        gone = [model for model in self._last_engine if ("engine", model) not in self._ready_at]
        for model in gone:
            del self._last_engine[model]

    def _known(self) -> list[str]:
        """Returns the names of all models of which a service is alive or was ready in the last QUEUE_WAIT_S."""
        now = self._now()
        alive = {model_of(beat) for service in SERVICES for beat in self._members.alive(service, now)}
        known = alive | {model for _, model in self._ready_at}
        return sorted(name for name in known if self._public(name) is not None)

    def _public(self, name: str) -> str | None:
        """Returns the name that requests use for the model with this bus name; None for an inactive version."""
        return name if self._versions is None else self._versions.public(name)

    def _refusal(self, wanted: str, cards: Sequence[ModelCard]) -> ServiceError:
        known = self._known()
        if not wanted and len(known) == 1:
            wanted = self._public(known[0]) or ""
        serving = wanted if self._versions is None else self._versions.serving(wanted)
        is_withdrawn = self._versions is not None and self._versions.is_withdrawn(wanted)
        if wanted and not is_withdrawn and (wanted in map(self._public, known) or wanted == self._default):
            lacks = _missing(serving, self._ready(recent=True))
            message = f"No {' and no '.join(lacks)} is ready for the model {wanted!r}. Try again shortly."
            return ServiceError(f"no_{lacks[0]}", message, retry_after_s=RETRY_AFTER_S)
        return unknown_model(cards, wanted)

    def _find_further(self, models: Sequence[ModelCard], name: str) -> ModelCard | None:
        found = (self._guests.find_card(model, name) for model in models) if name else ()
        return next((card for card in found if card is not None), None)

    def _card(self, name: str, status: EngineStatus, configuration: tuple[str, ...]) -> ModelCard:
        created = self._created.setdefault(name, self._clock.time_ns() // 1_000_000_000)
        tool_format, reasoning_format = self._formats.get(name, ("", ""))
        public = self._public(name) or name
        return ModelCard(
            name=public,
            path=status.model_path,
            max_model_len=status.max_model_len,
            vocab_size=status.vocab_size,
            created=created,
            aliases=status.model_aliases,
            configuration=configuration,
            tool_format=tool_format,
            reasoning_format=reasoning_format,
            embedding_size=status.embedding_size,
            takes_images=status.takes_images,
            generates=status.generates,
            labels=status.labels,
            facts=status.facts,
            content=status.content,
            kept_block_size=_kept_block_size(status),
            version_name=name if name != public else "",
        )


def _kept_block_size(status: EngineStatus) -> int:
    return status.block_size if status.kv_store else 0


def _facts_of(beat: Heartbeat) -> tuple[object, ...]:
    """Returns what cards depend on of a heartbeat: not the load, which changes with each."""
    status = beat.status
    if isinstance(status, EngineStatus):
        told = status.max_model_len, status.vocab_size, status.embedding_size, status.takes_images, status.generates
        names = status.model_path, status.model_aliases, status.labels, status.facts, _kept_block_size(status)
        return (beat.instance_id, beat.state, status.model, status.configuration, status.content, *told, *names)
    formats = (status.tool_format, status.reasoning_format) if isinstance(status, PoolStatus) else ()
    return (beat.instance_id, beat.state, model_of(beat), *formats)


def find_model(cards: Sequence[ModelCard], name: str) -> ModelCard | None:
    """Returns the model with this served name, path or alias, in this order of preference; None if there is none.

    If `name` is '', returns the first model.
    """
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
    """Returns the error for a name that none of the models has."""
    if not cards:
        message = "No engine is ready yet. Try again shortly."
        return ServiceError("no_engine", message, retry_after_s=RETRY_AFTER_S)
    names = ", ".join(repr(card.name) for card in cards)
    return ServiceError("model_not_found", f"The model {name!r} does not exist. Served here: {names}.", param="model")


def _missing(model: str, ready: Mapping[str, Collection[str]]) -> list[str]:
    """Returns the services of which the model has no ready member."""
    return [service for service in SERVICES if model not in ready[service]]
