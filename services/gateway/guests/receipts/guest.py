"""Decides which answers get a receipt, and follows their requests to learn which engines compute them.

A request asks for a receipt with a header (`HEADER`); with `--receipts all` each answer that can have one gets it. The
evidence, token ids beside the receipt, is only for requests that ask for it.
"""

import time
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request

from antiphon.services.gateway.apis.openai.answers.answer_encoder import AnswerEncoder
from antiphon.services.gateway.apis.openai.request_context import RequestContext, system_fingerprint
from antiphon.services.gateway.apis.openai.serving import Supplement
from antiphon.services.gateway.guests.receipts.encoder import ReceiptEncoder
from antiphon.services.gateway.guests.receipts.making import UNKNOWN, EnginesUsed, evidence_of, receipt_of
from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard
from antiphon.services.gateway.path.guest import Guest, RequestGuest, Running
from antiphon.services.gateway.path.sequence_state import Address
from antiphon.shared.config import GatewaySettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import EngineStatus, Heartbeat, PoolStatus
from antiphon.shared.receipts.document import EVIDENCE, MEMBER, EngineClaim, ModelClaim, encode
from antiphon.shared.receipts.signing import SigningKey, load_keys, published

HEADER = "x-antiphon-receipt"
_SHOWN = "X-Antiphon-Receipt"
_OBJECTS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat.completion.chunk"}
"""The routes whose streams consist of chunks, with the type of a chunk."""
_PATHS = frozenset({*_OBJECTS, "/v1/responses", "/v1/messages"})


class Members:
    """Finds the living members of the other services, as the gateway's actor has them."""

    def __init__(self, gateway: GatewayActor) -> None:
        self._gateway = gateway

    def engine(self, address: Address) -> EngineClaim:
        """Returns what a receipt says of an engine; UNKNOWN if it is not there any more."""
        beat = self._gateway.members.get("engine", address.id)
        if beat is None or beat.instance_id != address.instance_id or not isinstance(beat.status, EngineStatus):
            return UNKNOWN
        status = beat.status
        return EngineClaim(
            version=status.version,
            numerics=status.numerics,
            configuration=status.configuration,
            content=status.content,
            batch_invariant=status.batch_invariant,
        )

    def model(self, card: ModelCard) -> ModelClaim:
        """Returns what a receipt says of the files of a model."""
        pool = next(filter(None, (_pool(beat, card.served_by) for beat in self._tokenizers())), PoolStatus())
        return ModelClaim(
            name=card.name,
            weights=card.facts.digest,
            tokenizer=pool.tokenizer_digest,
            template=pool.template_digest,
        )

    def _tokenizers(self) -> Sequence[Heartbeat]:
        return self._gateway.members.alive("tokenizer", self._gateway.host.clock.monotonic())


def _pool(beat: Heartbeat, model: str) -> PoolStatus | None:
    return beat.status if isinstance(beat.status, PoolStatus) and beat.status.model == model else None


class ReceiptOrder:
    """The receipt of one request, from its acceptance to its answer."""

    def __init__(self, members: Members, key: SigningKey, *, has_evidence: bool) -> None:
        self._members, self._key, self._has_evidence = members, key, has_evidence
        self._running: Running | None = None
        self._engines = EnginesUsed()
        self._seen: set[tuple[int, Address]] = set()
        """Sequences with engines that were looked up already. They may have died since."""

    def follow(self, running: Running) -> None:
        """Begins to follow the request."""
        self._running = running

    def look(self) -> None:
        """Notes the engines on which the sequences are."""
        assert self._running is not None
        for sequence in self._running.sequences:
            if sequence.prefill is not None:
                self._add(sequence.index, sequence.prefill.engine)
            if sequence.engine is not None:
                self._add(sequence.index, sequence.engine)

    def _add(self, index: int, engine: Address) -> None:
        if (index, engine) not in self._seen:
            self._seen.add((index, engine))
            self._engines.add(index, self._members.engine(engine))

    def members(self) -> dict[str, Any]:
        """Returns the signed receipt, and the evidence if it was asked for, as members of the answer.

        The request must have ended without an error.
        """
        running = self._running
        assert running is not None
        model = self._members.model(running.card)
        receipt = receipt_of(running, model, self._engines, int(time.time()))
        evidence = {EVIDENCE: evidence_of(running)} if self._has_evidence else {}
        return {MEMBER: self._key.sign(encode(receipt)), **evidence}


class FollowsEngines(RequestGuest):
    """Tells the order of a request where its sequences are."""

    def __init__(self, order: ReceiptOrder) -> None:
        self._order = order

    def placed(self) -> None:
        """See RequestGuest."""
        self._order.look()

    def ended(self) -> None:
        """See RequestGuest. An engine may have answered before its acceptance was known."""
        self._order.look()


class Receipts(Guest, Supplement):
    """The receipts of one gateway. `keys`: the first one signs; empty: there are no receipts."""

    asked_by = attrgetter("guests.orders")
    header = HEADER

    def __init__(self, members: Members, keys: Sequence[SigningKey], *, for_all: bool) -> None:
        self._members, self._keys = members, keys
        self.for_all = for_all

    @property
    def published(self) -> bytes | None:
        """The public keys as a JWK set; None without keys."""
        return published(self._keys) if self._keys else None

    def join(
        self, request: Request, context: RequestContext, encoder: AnswerEncoder
    ) -> tuple[RequestContext, AnswerEncoder]:
        """See Supplement."""
        asked = _asked(request.headers.get(HEADER))
        if not (asked or self.for_all):
            return context, encoder
        if (reason := self._cannot(request, context, encoder)) and asked:
            raise _refused(reason)
        if reason:
            return context, encoder
        order = ReceiptOrder(self._members, self._keys[0], has_evidence=asked == "full")
        guests = context.request.guests
        guests = replace(guests, orders=(*guests.orders, order))
        context = replace(context, request=replace(context.request, guests=guests))
        return context, ReceiptEncoder(encoder, order.members, _chunk(request.url.path, context))

    def refuse(self, request: Request, what: str) -> None:
        """See Supplement."""
        if _asked(request.headers.get(HEADER)):
            raise _refused(f"A receipt cannot cover {what}")

    def joins(self, request: GenerationRequest, card: ModelCard, running: Running | None) -> FollowsEngines | None:
        """See Guest."""
        order = next((one for one in request.guests.orders if isinstance(one, ReceiptOrder)), None)
        if order is None or running is None:
            return None
        order.follow(running)
        return FollowsEngines(order)

    def _cannot(self, request: Request, context: RequestContext, encoder: AnswerEncoder) -> str:
        """Returns why an answer cannot have a receipt, as the beginning of a sentence; "" if it can."""
        if not self._keys:
            return "This server signs no receipts (start it with --receipt-keys FILE)"
        if request.url.path not in _PATHS:
            return f"Answers of {request.url.path} have no receipts"
        wanted = context.request
        response: dict[str, Any] = getattr(encoder, "response", {})
        reasons = {
            "a beam search": wanted.params.beam is not None,
            "'best_of' above 'n'": wanted.num_sequences != wanted.n,
            "images": bool(wanted.inputs.images),
            "an adapter": bool(context.card.adapter_version),
            "an echo without output": wanted.output.only_echoes,
            "a response in the background": bool(response.get("background")),
        }
        found = next((what for what, applies in reasons.items() if applies), "")
        return f"A receipt cannot cover {found}" if found else ""


def _refused(reason: str) -> ServiceError:
    return ServiceError("unsupported_parameter", f"{reason}: leave '{_SHOWN}' out.", param=_SHOWN)


def _asked(value: str | None) -> str:
    """Returns what the header asks for: "" for nothing, "1" or "full". Raises ServiceError."""
    if value is None or value in ("", "0"):
        return ""
    if value not in ("1", "full"):
        message = f"'{_SHOWN}' must be 1 (a receipt), full (with the token ids as evidence) or 0."
        raise ServiceError("invalid_value", message, param=_SHOWN)
    return value


def _chunk(path: str, context: RequestContext) -> dict[str, Any] | None:
    """Returns what a chunk of the stream has besides the receipt; None if the API's events have names."""
    if path not in _OBJECTS:
        return None
    return {
        "id": context.id,
        "object": _OBJECTS[path],
        "created": context.arrival.created,
        "model": context.card.name,
        "system_fingerprint": system_fingerprint(context.card),
        "choices": [],
    }


def make(gateway: GatewayActor, settings: GatewaySettings) -> Receipts:
    """See `guests.make_guests`. Raises SettingsError for a key file that cannot be used."""
    keys = load_keys(Path(settings.receipt_keys)) if settings.receipt_keys else ()
    return Receipts(Members(gateway), keys, for_all=settings.receipts == "all")
