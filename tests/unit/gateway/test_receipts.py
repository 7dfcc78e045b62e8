"""Which answers get a receipt, and where it is in the bytes of each kind of answer."""

import json
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace
from starlette.requests import Request

from antiphon.services.gateway.apis.openai.answers.answer_encoder import AnswerEncoder, GenerationState
from antiphon.services.gateway.apis.openai.request_context import Arrival, RequestContext
from antiphon.services.gateway.edge.http import sse
from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.services.gateway.guests.receipts.api import PATH
from antiphon.services.gateway.guests.receipts.encoder import ReceiptEncoder
from antiphon.services.gateway.guests.receipts.guest import Members, ReceiptOrder, Receipts
from antiphon.services.gateway.guests.receipts.making import UNKNOWN, EnginesUsed
from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard
from antiphon.services.gateway.path.guest import Running
from antiphon.services.gateway.path.messages import Prompt, RequestMessages
from antiphon.services.gateway.path.sequence_state import Address, SequenceState
from antiphon.shared.codec import pack_ids
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.receipts.document import EVIDENCE, MEMBER, EngineClaim, Evidence, ModelClaim, decode, digest
from antiphon.shared.receipts.signing import SigningKey, verified
from antiphon.shared.security.api_keys import ANONYMOUS

KEY = SigningKey.of(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
CARD = ModelCard(name="m", path="m", max_model_len=64, vocab_size=9, created=0)
STATE = cast(GenerationState, None)
NOBODY = cast(Members, None)


class Plain:
    """An encoder with fixed events, named or not."""

    content_type = sse.CONTENT_TYPE

    def __init__(self, closing: bytes) -> None:
        self._closing = closing

    def whole(self, state: GenerationState) -> bytes:
        return b'{"id":"a"}'

    def closing(self, state: GenerationState) -> bytes:
        return self._closing


class Numbered(Plain):
    """An encoder whose events have numbers."""

    def __init__(self) -> None:
        super().__init__(b"")
        self.next_number = 7

    def number_from(self, number: int) -> None:
        self.next_number = number

    def closing(self, state: GenerationState) -> bytes:
        self.next_number += 1
        return sse.named_event(b"end", b'{"sequence_number":%d}' % (self.next_number - 1))


def encoder_of(inner: Any, chunk: dict[str, Any] | None = None) -> ReceiptEncoder:
    return ReceiptEncoder(cast(AnswerEncoder, inner), lambda: {"antiphon_receipt": "r"}, chunk)


def test_a_whole_answer_has_the_receipt_as_a_further_member() -> None:
    assert json.loads(encoder_of(Plain(b"")).whole(STATE)) == {"id": "a", "antiphon_receipt": "r"}


def test_an_event_without_a_name_is_the_last_before_the_end() -> None:
    inner = Plain(sse.event(b'{"usage":1}') + sse.DONE)
    events = sse.split_events(encoder_of(inner, {"choices": []}).closing(STATE))
    assert events == [sse.event(b'{"usage":1}'), sse.event(b'{"choices":[],"antiphon_receipt":"r"}'), sse.DONE]


def test_a_named_event_comes_before_the_last_one_of_the_api() -> None:
    first, last = sse.named_event(b"delta", b"{}"), sse.named_event(b"stop", b"{}")
    events = sse.split_events(encoder_of(Plain(first + last)).closing(STATE))
    assert (events[0], events[2]) == (first, last)
    assert events[1].startswith(b"event: antiphon.receipt\n")


def test_numbers_of_events_stay_without_gaps() -> None:
    encoder = encoder_of(Numbered())
    receipt, end = sse.split_events(encoder.closing(STATE))
    assert b'"sequence_number":7' in receipt
    assert b'"sequence_number":8' in end
    assert encoder.next_number == 9
    assert not hasattr(encoder, "flush")


def asked(value: str | None = None, path: str = "/v1/completions") -> Request:
    headers = [] if value is None else [(b"x-antiphon-receipt", value.encode())]
    scope = {
        "type": "http",
        "path": path,
        "headers": headers,
        "query_string": b"",
        "server": ("h", 1),
        "scheme": "http",
    }
    return Request(scope)


def context_of(**fields: Any) -> RequestContext:
    request = replace(GenerationRequest(request_id="r", model="m", params=SamplingParams()), **fields)
    return RequestContext(arrival=Arrival(0, 0.0), card=CARD, request=request, stream=False)


def receipts(*keys: SigningKey, for_all: bool = False) -> Receipts:
    return Receipts(NOBODY, keys, for_all=for_all)


@pytest.mark.parametrize(("value", "for_all"), [("1", False), ("full", False), (None, True), ("0", True)])
def test_a_request_that_asks_gets_one_or_all_do(value: str | None, for_all: bool) -> None:
    context, encoder = receipts(KEY, for_all=for_all).join(asked(value), context_of(), cast(AnswerEncoder, Plain(b"")))
    assert isinstance(encoder, ReceiptEncoder)
    assert len(context.request.guests.orders) == 1


def test_a_request_that_does_not_ask_is_left_alone() -> None:
    context, inner = context_of(), cast(AnswerEncoder, Plain(b""))
    assert receipts(KEY).join(asked("0"), context, inner) == (context, inner)


@pytest.mark.parametrize(
    ("made", "fields", "path", "reason"),
    [
        (receipts(), {}, "/v1/completions", "--receipt-keys"),
        (receipts(KEY, for_all=True), {"best_of": 3}, "/v1/completions", "'best_of'"),
        (receipts(KEY, for_all=True), {}, "/generate", "/generate have no receipts"),
    ],
)
def test_what_cannot_have_a_receipt_is_refused_if_asked_and_else_has_none(
    made: Receipts, fields: dict[str, Any], path: str, reason: str
) -> None:
    context, inner = context_of(**fields), cast(AnswerEncoder, Plain(b""))
    with pytest.raises(ServiceError, match=reason):
        made.join(asked("1", path), context, inner)
    with pytest.raises(ServiceError, match="must be 1"):
        made.join(asked("2", path), context, inner)
    assert made.join(asked(None, path), context, inner) == (context, inner)


def test_the_public_keys_are_open_to_all_and_the_private_parts_to_nobody() -> None:
    assert ApiKeys("secret").check(PATH, {}) is ANONYMOUS
    assert receipts().published is None
    published = receipts(KEY).published
    assert published is not None
    assert '"d"' not in published.decode()
    assert KEY.kid in published.decode()


class Living:
    """The members that a gateway sees: an engine that dies."""

    def __init__(self) -> None:
        self.claims = {"e-1": EngineClaim(numerics="a")}

    def engine(self, address: Address) -> EngineClaim:
        return self.claims.get(address.id, UNKNOWN)

    def model(self, card: ModelCard) -> ModelClaim:
        return ModelClaim(name=card.name, weights="w")


class Ended:
    """A request that has ended on its engine."""

    request = GenerationRequest(request_id="r", model="m", params=SamplingParams(seed=3))
    card = CARD

    def __init__(self) -> None:
        self.prompts = [Prompt(packed=pack_ids([1, 2]), block_hashes=b"")]
        self.sequences = [SequenceState(sequence_id="r-0", engine=Address("e-1", "i"), token_ids=[5, 6])]
        self.sequences[0].finish_reason = "stop"
        self.messages = RequestMessages(cast(Any, None), self.request, CARD, self.prompts)


def test_an_engine_that_dies_after_its_work_is_told_as_it_was() -> None:
    members, running = Living(), Ended()
    order = ReceiptOrder(cast(Members, members), KEY, has_evidence=True)
    order.follow(cast(Running, running))
    order.look()
    members.claims.clear()
    order.look()
    told = order.members()
    receipt = decode(verified(told[MEMBER], None)[0])
    assert receipt.engines == [EngineClaim(numerics="a")]
    assert receipt.outputs[0].params == {"seed": 3}
    assert receipt.outputs[0].digest == digest([5, 6])
    assert receipt.prompts[0].digest == digest([1, 2])
    assert told[EVIDENCE] == Evidence([[1, 2]], [[5, 6]])


def test_engines_that_compute_alike_are_told_once_in_the_order_of_their_turns() -> None:
    one, other = EngineClaim(numerics="a"), EngineClaim(numerics="b")
    used = EnginesUsed()
    for index, claim in ((0, one), (1, other), (0, EngineClaim(numerics="a")), (0, other)):
        used.add(index, claim)
    assert used.claims == [one, other]
    assert used.by_sequence == {0: [0, 1], 1: [1]}
