"""Chooses engine and detokenizer of a sequence, from heartbeats and what this gateway has sent since. Pure.

The cost of an engine is measured in tokens: prompt tokens that wait there, plus the tokens of this prompt that are not
in the engine's prefix cache, plus `RUNNING_COST` for each sequence there. The cheapest engine is chosen; among equals,
the one with the fewest prompt tokens since its start. What is in a prefix cache says `prefixes`.

An engine is chosen only if it has credit: the number of sequences that it can accept, as its heartbeat says. The router
subtracts the sequences that this gateway has sent since that heartbeat, or sent before without an answer yet, and adds
those that have ended there. Other gateways see the same credit, so an engine may get more sequences than it offered;
its credit is then negative. A gateway may always have a few sequences at each engine (`SHARE`), so that other gateways
cannot starve it.

Sequences of the idle lane are preempted by others, so they do not reduce the credit for other sequences and do not
count in the cost for them. The idle lane has its own credit, which counts all sequences; a gateway may always have one
idle sequence at each engine.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from antiphon.services.gateway.path.prefixes import KnownBlocks, PrefixIndex
from antiphon.shared import limits
from antiphon.shared.messages import EngineStatus, GatewayStatus, Heartbeat, StreamStatus

OTHER_CONFIGURATION = 2
"""Factor of the cost of a prefill engine whose configuration, such as its number of devices, is not that of the decode
engine. So engines of the same configuration are preferred while idle; if a prompt of similar length waits there,
another engine is chosen.
"""
RUNNING_COST = 16
"""Cost of a sequence at an engine, in tokens: it delays the first token of a new sequence about as much as this many
prompt tokens."""

RECOVERY_STEPS = 2
"""Steps of an engine that sequences with output of another placement may fill, for each gateway. Enough for the engine
to compute until the gateway has the output of the first of them and has sent others."""

SHARE = 8
"""Without credit a gateway may still have `max_num_seqs // SHARE` sequences at an engine, and at least one."""


@dataclass(slots=True, kw_only=True)
class EngineLoad:
    """This gateway's sequences at one engine, and the changes since the engine's heartbeat number `heartbeat`."""

    heartbeat: int = -1
    tokens: int = 0
    sent: int = 0
    """Sequences that the heartbeat's credit may not count: sent since then, or still unanswered when it arrived."""
    ended: int = 0
    unanswered: set[str] = field(default_factory=set[str])
    held: dict[str, str] = field(default_factory=dict[str, str])
    """Sequences that were sent to the engine and have not ended, with their clients."""
    clients: Counter[str] = field(default_factory=Counter[str])
    """Number of these sequences by client."""
    idle: set[str] = field(default_factory=set[str])
    """Sequences of the idle lane that were sent to the engine and have not ended. `held` does not have them."""
    idle_sent: int = 0
    idle_ended: int = 0
    """As `sent` and `ended`, for sequences of the idle lane."""
    refused: bool = False
    """The engine has refused a sequence or not answered; it gets no sequence until its next heartbeat."""
    recovering: dict[str, int] = field(default_factory=dict[str, int])
    """Sequences with output from another placement that have no new output yet, with the tokens to compute again."""
    silent: bool = False
    """The engine has not answered a submit. Until it answers one, it gets at most one sequence per heartbeat."""

    def hold(self, sequence_id: str, client: str, *, idle: bool = False) -> None:
        """Records a sequence that is being sent to the engine."""
        if idle:
            self.idle.add(sequence_id)
            return
        self.held[sequence_id] = client
        self.clients[client] += 1

    def let_go(self, sequence_id: str) -> bool:
        """Removes a sequence that is not of the idle lane. Returns False if it was not recorded."""
        self.recovering.pop(sequence_id, None)
        client = self.held.pop(sequence_id, None)
        if client is None:
            return False
        self.clients[client] -= 1
        if not self.clients[client]:
            del self.clients[client]
        return True


@dataclass(slots=True)
class Router:
    """This gateway's view of the load of engines and detokenizers, which is more recent than their heartbeats."""

    _loads: dict[tuple[str, str], EngineLoad] = field(default_factory=dict[tuple[str, str], EngineLoad])
    _prefixes: dict[tuple[str, str], PrefixIndex] = field(default_factory=dict[tuple[str, str], PrefixIndex])
    """Of the engines that are not followed."""
    _known: dict[tuple[str, str], KnownBlocks] = field(default_factory=dict[tuple[str, str], KnownBlocks])
    """Of the engines whose prefix caches are followed."""
    _streams: dict[tuple[str, str], set[str]] = field(default_factory=dict[tuple[str, str], set[str]])

    def choose_engine(
        self, engines: Sequence[Heartbeat], model: str, num_tokens: int, blocks: Sequence[int],
        avoid: Collection[tuple[str, str]] = (), affinity: Collection[tuple[str, str]] = (), client: str = "", *,
        joins: bool = False, pools: bool = False, idle: bool = False, recovers: bool = False,
        readers: Collection[tuple[str, str]] = (),
    ) -> Heartbeat | None:  # fmt: skip
        """Returns the cheapest ready engine of the model with credit; None if there is none.

        Engines in `affinity`, which already compute the same prompt, are preferred while they have a free batch slot;
        if the sequence `joins` a computation there (a beam search), even without credit. Engines in `avoid`, on which a
        placement of the sequence failed, are chosen only if there is no other. Prefill engines (or, if the sequence
        `pools`, decode engines) are also chosen only if there is no other.

        A sequence that `recovers`, whose output must be computed again, waits while an engine has RECOVERY_STEPS steps
        full of such sequences: if another engine is ready before their turn, as a lost engine may be again, it computes
        the rest. It does not wait for `readers`, which read its KV.
        """
        engines = _with_role(ready_members(engines, model), "decode" if pools else "prefill")
        if joins:
            searching = [e for e in engines if (e.id, e.instance_id) in affinity]
            found = next((e for e in searching if (e.id, e.instance_id) not in avoid), None)
            if found is not None:
                return found
        ready = [e for e in engines if self.credit(e, client, idle=idle) > 0]
        ready = [e for e in ready if not recovers or (e.id, e.instance_id) in readers or self._may_recover(e)]
        if len(ready) == 1:
            return ready[0]
        ready = [e for e in ready if (e.id, e.instance_id) not in avoid] or ready
        ready = [e for e in ready if (e.id, e.instance_id) in affinity and self._has_row(e)] or ready
        return min(
            ready,
            key=lambda e: (self._cost(e, num_tokens, blocks, idle), _engine_status(e).counters.prompt_tokens, e.id),
            default=None,
        )

    def prefill_engines(self, engines: Sequence[Heartbeat], model: str, decode: Heartbeat) -> list[Heartbeat]:
        """Returns the responsive prefill engines that can serve a decode engine: those with the same weights."""
        wanted = _engine_status(decode)
        ready = [e for e in ready_members(engines, model) if _engine_status(e).kv_address and not self._load(e).silent]
        return [e for e in ready if _engine_status(e).content == wanted.content]

    def choose_prefill(
        self,
        prefill_engines: Sequence[Heartbeat],
        num_tokens: int,
        blocks: Sequence[int],
        client: str,
        *,
        configuration: str,
        idle: bool = False,
    ) -> Heartbeat | None:
        """Returns the cheapest of the engines with credit; None if none has any.

        Engines with the decode engine's `configuration` are preferred up to OTHER_CONFIGURATION times the cost. With
        the same configuration the tokens do not depend on which engine computes the prompt; the limit keeps the others
        from being idle.
        """

        def cost(e: Heartbeat) -> int:
            same = configuration_of(e) == configuration
            return self._cost(e, num_tokens, blocks, idle) * (1 if same else OTHER_CONFIGURATION)

        able = [e for e in prefill_engines if self.credit(e, client, idle=idle) > 0]
        return min(able, key=lambda e: (cost(e), _engine_status(e).counters.prompt_tokens, e.id), default=None)

    def num_missing_tokens(self, engine: Heartbeat, num_tokens: int, blocks: Sequence[int]) -> int:
        """Returns how many tokens of a prompt are not in the engine's prefix cache, by this gateway's estimate."""
        key = engine.id, engine.instance_id
        prefixes = self._known.get(key) or self._prefixes.get(key)
        cached = prefixes.overlap(blocks) * _engine_status(engine).block_size if prefixes is not None else 0
        return max(0, num_tokens - cached)

    def credit(self, engine: Heartbeat, client: str = "", *, idle: bool = False) -> int:
        """Returns how many sequences this gateway may send to the engine now; 0 or negative: none.

        `idle`: sequences of the idle lane.

        A client (API key) that has no sequence of this gateway at the engine may send one beyond the credit, as long as
        few clients have sequences there. The engine serves such a sequence before further sequences of other clients,
        so the sequence need not wait for credit.
        """
        load, status = self._load(engine), _engine_status(engine)
        if load.silent:
            return 0 if load.refused or load.unanswered else 1
        if load.refused:
            return 0
        if idle:
            changes = load.ended + load.idle_ended - load.sent - load.idle_sent
            return max(status.idle_credits + changes, 1 - len(load.idle))
        share = max(1, status.max_num_seqs // SHARE) - len(load.held)
        credit = max(status.credits - load.sent + load.ended, share)
        is_newcomer = client and client not in load.clients and len(load.clients) <= _newcomers_max(engine)
        return max(credit, 1) if is_newcomer else credit

    def newcomers(self, engines: Sequence[Heartbeat]) -> Callable[[str], bool] | None:
        """Returns a function that tells whether a client may send a sequence beyond the credit, see `credit`.

        Returns None if no client may at any of the engines. The function follows later changes of the loads.
        """
        open_to_them = [
            (load, most)
            for engine in engines
            if not (load := self._load(engine)).silent
            and not load.refused
            and len(load.clients) <= (most := _newcomers_max(engine))
        ]
        if not open_to_them:
            return None
        return lambda client: (
            bool(client)
            and any(
                client not in load.clients and len(load.clients) <= most and not load.refused
                for load, most in open_to_them
            )
        )

    def can_take(self, engines: Sequence[Heartbeat], model: str) -> bool:
        """Whether the model has a ready engine that responds, even if it has no credit now, or one that sleeps."""
        return any(
            e.state == "sleeping" or (e.state == "ready" and not self._load(e).silent)
            for e in engines
            if model_of(e) == model
        )

    def num_queued(self, engines: Sequence[Heartbeat]) -> int:
        """Returns how many of this gateway's sequences wait at engines without a free batch slot."""
        return sum(max(0, len(self._load(e).held) - _engine_status(e).max_num_seqs) for e in engines)

    def room(self, engines: Sequence[Heartbeat], model: str) -> int:
        """Returns the number of sequences with text for which the ready engines of the model have credit."""
        return sum(max(0, self.credit(engine)) for engine in _with_role(ready_members(engines, model), "prefill"))

    def choose_detokenizer(
        self, detokenizers: Sequence[Heartbeat], model: str, avoid: Collection[tuple[str, str]] = ()
    ) -> Heartbeat | None:
        """Returns the model's ready detokenizer with the fewest streams; None if there is none or all are full.

        Detokenizers in `avoid` are chosen only if there is no other.
        """
        ready = [d for d in ready_members(detokenizers, model) if self._num_streams(d) < limits.STREAMS_MAX]
        if len(ready) == 1:
            return ready[0]
        ready = [d for d in ready if (d.id, d.instance_id) not in avoid] or ready
        return min(ready, key=lambda d: (self._num_streams(d), d.id), default=None)

    def record_dispatch(
        self,
        engine: Heartbeat,
        sequence_id: str,
        num_tokens: int,
        blocks: Sequence[int],
        client: str = "",
        *,
        idle: bool = False,
        recovers: bool = False,
    ) -> None:
        """Records that a sequence is being sent to an engine. `idle`: it is one of the idle lane.

        `recovers`: it has output, which is among its `num_tokens` tokens to compute.
        """
        load, key = self._load(engine), (engine.id, engine.instance_id)
        known = self._known.get(key)
        if not idle:
            load.tokens += num_tokens if known is None else self.num_missing_tokens(engine, num_tokens, blocks)
        load.sent += not idle
        load.idle_sent += idle
        load.unanswered.add(sequence_id)
        load.hold(sequence_id, client, idle=idle)
        if recovers and not idle:
            load.recovering[sequence_id] = self.num_missing_tokens(engine, num_tokens, blocks)
        if known is not None:
            known.sent(sequence_id, blocks)
            return
        prefixes = self._prefixes.get(key)
        if prefixes is None:
            prefixes = self._prefixes[key] = PrefixIndex(_engine_status(engine).num_blocks)
        prefixes.add(blocks)

    def record_answer(self, engine: tuple[str, str], sequence_id: str, *, accepted: bool) -> None:
        """Records that the engine has accepted or refused a sequence."""
        load = self._loads.get(engine)
        if load is not None:
            load.unanswered.discard(sequence_id)
            load.silent = False
            if not accepted:
                load.refused = True
                self._drop(engine, load, sequence_id)

    def record_silence(self, engine: tuple[str, str], sequence_id: str) -> None:
        """Records that the engine has not answered the submit of a sequence in time."""
        load = self._loads.get(engine)
        if load is not None:
            load.unanswered.discard(sequence_id)
            self._drop(engine, load, sequence_id)
            load.silent = load.refused = True

    def record_output(self, engine: tuple[str, str], sequence_id: str) -> None:
        """Records that a sequence has new output from an engine, which therefore has computed its earlier tokens."""
        load = self._loads.get(engine)
        if load is not None and load.recovering:
            load.recovering.pop(sequence_id, None)

    def record_end(self, engine: tuple[str, str], sequence_id: str) -> None:
        """Records that a sequence has ended at an engine or was moved away from it. Idempotent."""
        load = self._loads.get(engine)
        if (known := self._known.get(engine)) is not None:
            known.ended(sequence_id)
        if load is None:
            return
        if sequence_id in load.idle:
            load.idle.discard(sequence_id)
            load.idle_ended += 1
        elif load.let_go(sequence_id):
            load.ended += 1

    def stream_opened(self, detokenizer: tuple[str, str], sequence_id: str) -> None:
        """Records that a stream of this gateway is being opened, or is open, at a detokenizer."""
        self._streams.setdefault(detokenizer, set()).add(sequence_id)

    def stream_closed(self, detokenizer: tuple[str, str], sequence_id: str) -> None:
        """Records that a stream of this gateway is no longer open at a detokenizer. Idempotent."""
        self._streams.get(detokenizer, set[str]()).discard(sequence_id)

    def follow(self, engine: tuple[str, str], known: KnownBlocks | None) -> None:
        """Has the content of an engine's prefix cache from now on; None: estimates it again."""
        if known is None:
            self._known.pop(engine, None)
            return
        self._known[engine] = known
        self._prefixes.pop(engine, None)

    def forget(self, member: tuple[str, str]) -> None:
        """Drops all records of a member that is lost."""
        for table in (self._loads, self._prefixes, self._known, self._streams):
            table.pop(member, None)

    def _cost(self, engine: Heartbeat, num_tokens: int, blocks: Sequence[int], idle: bool) -> int:
        status, load = _engine_status(engine), self._load(engine)
        there = status.load
        known = self._known.get((engine.id, engine.instance_id))
        share = 1.0 if known is None else known.missing_share
        # The engine counts the tokens of waiting prompts without looking for them in its cache.
        waiting = there.num_waiting_tokens - (0 if idle else there.num_idle_waiting_tokens)
        cost = round(waiting * share) + load.tokens + self.num_missing_tokens(engine, num_tokens, blocks)
        if not idle:
            return cost + RUNNING_COST * (_num_ordinary(status) + load.sent)
        return cost + RUNNING_COST * (there.num_running + there.num_waiting + load.sent + load.idle_sent)

    def _drop(self, engine: tuple[str, str], load: EngineLoad, sequence_id: str) -> None:
        """Removes a sequence that the engine does not run."""
        load.let_go(sequence_id)
        load.idle.discard(sequence_id)
        if (known := self._known.get(engine)) is not None:
            known.ended(sequence_id)

    def _may_recover(self, engine: Heartbeat) -> bool:
        """Whether the engine can begin soon with one more sequence that recovers."""
        most = RECOVERY_STEPS * _engine_status(engine).step_tokens
        return not most or sum(self._load(engine).recovering.values()) < most

    def _has_row(self, engine: Heartbeat) -> bool:
        status = _engine_status(engine)
        return _num_ordinary(status) + self._load(engine).sent < status.max_num_seqs

    def _num_streams(self, detokenizer: Heartbeat) -> int:
        # The heartbeat counts the streams of all gateways; this gateway knows its own new streams before the next
        # heartbeat.
        reported = detokenizer.status.num_streams if isinstance(detokenizer.status, StreamStatus) else 0
        return max(reported, len(self._streams.get((detokenizer.id, detokenizer.instance_id), ())))

    def _load(self, engine: Heartbeat) -> EngineLoad:
        load = self._loads.get((engine.id, engine.instance_id))
        if load is None:
            load = self._loads[engine.id, engine.instance_id] = EngineLoad()
        if load.heartbeat != engine.sequence:
            load.heartbeat, load.tokens, load.ended, load.idle_ended = engine.sequence, 0, 0, 0
            load.idle_sent = len(load.unanswered & load.idle)
            load.sent = len(load.unanswered) - load.idle_sent
            load.refused = False
            if (known := self._known.get((engine.id, engine.instance_id))) is not None:
                known.heartbeat()
        return load


def _newcomers_max(engine: Heartbeat) -> int:
    """Returns the number of clients with sequences at an engine up to which a further client needs no credit."""
    return max(1, _engine_status(engine).max_num_seqs // SHARE)


def _num_ordinary(status: EngineStatus) -> int:
    """Returns the number of sequences at an engine, without those of the idle lane, which give way to others."""
    load = status.load
    return load.num_running + load.num_waiting - load.num_idle_running - load.num_idle_waiting


def served_models(engines: Sequence[Heartbeat]) -> Mapping[str, EngineStatus]:
    """Returns the status of one serving engine for each model name."""
    return {_engine_status(e).model: _engine_status(e) for e in reversed(engines) if serves(e)}


def model_of(member: Heartbeat) -> str:
    """Returns the served name of a member's model; '' for a gateway."""
    return "" if isinstance(member.status, GatewayStatus) else member.status.model


def serves(member: Heartbeat) -> bool:
    """Whether the model of a member can be used because of it: it takes work, or will when it has been woken."""
    return member.state in ("ready", "sleeping")


def ready_members(members: Sequence[Heartbeat], model: str) -> list[Heartbeat]:
    """Returns the ready members of the model."""
    return [member for member in members if member.state == "ready" and model_of(member) == model]


def configuration_of(engine: Heartbeat) -> str:
    """Returns the `EngineStatus.configuration` of an engine."""
    return _engine_status(engine).configuration


def _with_role(engines: Sequence[Heartbeat], last: str) -> Sequence[Heartbeat]:
    """Returns the engines without the role `last`; all engines if every one has it."""
    return [engine for engine in engines if _engine_status(engine).role != last] or engines


def served_configurations(engines: Sequence[Heartbeat], model: str) -> tuple[str, ...]:
    """Returns the distinct configurations (`EngineStatus.configuration`) of a model's serving engines, sorted."""
    serving = [engine for engine in engines if serves(engine) and model_of(engine) == model]
    return tuple(sorted({_engine_status(engine).configuration for engine in serving}))


def _engine_status(engine: Heartbeat) -> EngineStatus:
    assert isinstance(engine.status, EngineStatus)
    return engine.status
