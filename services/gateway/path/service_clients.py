"""Sends the gateway's messages to the other services: one typed method for each, with its timeout and retries."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal

from antiphon.services.gateway.path.router import ready_members
from antiphon.services.gateway.path.sequence_state import Address
from antiphon.shared import limits
from antiphon.shared.actors.actor import ask, ask_encoded, tell_in_parts
from antiphon.shared.actors.host import Host
from antiphon.shared.actors.presence import Members
from antiphon.shared.bus.transport import Headers, NoRespondersError, RequestTimeoutError
from antiphon.shared.codec import Decoder, encode
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import (
    Ack,
    Cancel,
    CloseStream,
    DetokenizeReply,
    DetokenizeRequest,
    Done,
    EncodeImage,
    ErrorReply,
    ImageEncoded,
    Message,
    OpenBatch,
    OpenBatchReply,
    OpenStream,
    OwnershipQuery,
    OwnershipReply,
    ProgressQuery,
    Resend,
    Retarget,
    SelfTest,
    SequenceRef,
    SubmitBatch,
    SubmitBatchReply,
    TokenizeReply,
    TokenizeRequest,
)

_TOKENIZED = Decoder([TokenizeReply, DetokenizeReply, ErrorReply])
_ENCODED = Decoder([ImageEncoded, ErrorReply])
_ACK = Decoder([Ack, ErrorReply])
_OPENED = Decoder([OpenBatchReply, ErrorReply])
_SUBMITTED = Decoder([SubmitBatchReply, ErrorReply])
TOKENIZE_CHARS_PER_S = 250_000
"""Rate at which the timeout of a tokenize request grows with its text. Every tokenizer is faster."""
FIRST_TRY_S = 0.3
IMAGE_TRY_S = 2.0
"""Timeout of the first request to encode an image. A retry for the same image waits for the same computation."""
RETRY_PAUSE_S = 0.05
ProbeResult = Literal["gone", "silent", "answers"]
"""What a probe found; see `ServiceClients.probe`."""


def _ignored(name: str, waited_s: float) -> None:
    """The default of `on_silent`."""


class PeerUnavailableError(Exception):
    """The peer does not answer (gone, frozen or disconnected) or is full. Another member may be tried."""


class ServiceClients:
    """Sends messages of one gateway to tokenizers, engines and detokenizers."""

    def __init__(self, host: Host, members: Members) -> None:
        self._host, self._subjects = host, host.subjects
        self._members, self._now = members, host.clock.monotonic

    async def tokenizer(
        self,
        message: TokenizeRequest | DetokenizeRequest,
        size: int,
        headers: Headers | None,
        on_silent: Callable[[str, float], None] = _ignored,
    ) -> Message:
        """Sends a request to the model's tokenizers and returns the reply. Raises ServiceError.

        The first try goes to the queue group; if there is no answer, retries go to tokenizers that are known to be
        alive. `size` is the number of characters of the text or of tokens in the list. `on_silent` is called after a
        try without an answer in time, with the id of the tokenizer, which is empty for the one that the queue group has
        chosen, and the seconds for which it was silent.
        """
        deadline = self._now() + limits.QUEUE_WAIT_S
        (subject, name), attempt, tried = (self._subjects.tokenize(message.model), ""), 0, set[str]()
        data = encode(message)
        while True:
            timeout_s = FIRST_TRY_S * 2 ** min(attempt, 4) + size / TOKENIZE_CHARS_PER_S
            try:
                return await ask_encoded(
                    self._host.transport, subject, data, _TOKENIZED, timeout_s=timeout_s, headers=headers
                )
            except (NoRespondersError, RequestTimeoutError) as error:
                if isinstance(error, RequestTimeoutError):
                    on_silent(name, timeout_s)
                attempt += 1
                if self._now() > deadline:
                    reason = f"No tokenizer of the model {message.model!r} answers. Try again shortly."
                    raise ServiceError("no_tokenizer", reason, retry_after_s=1.0) from None
                subject, name = self._another_tokenizer(message.model, tried)
                await asyncio.sleep(RETRY_PAUSE_S)

    async def image(self, message: EncodeImage) -> ImageEncoded:
        """Has an image encoded by one of the model's image services. Raises ServiceError.

        Without an answer the request is sent again, which is safe: a replica that already encodes the image continues.
        """
        deadline, attempt = self._now() + limits.IMAGE_ENCODE_S, 0
        subject, alone_until = self._subjects.vision(message.model), self._now() + limits.QUEUE_WAIT_S
        while True:
            try:
                timeout_s = IMAGE_TRY_S * 2 ** min(attempt, 3)
                reply = await ask(self._host.transport, subject, message, _ENCODED, timeout_s=timeout_s)
                assert isinstance(reply, ImageEncoded)
                return reply
            except RequestTimeoutError:
                attempt, alone_until = attempt + 1, self._now() + limits.QUEUE_WAIT_S
            except NoRespondersError:
                await asyncio.sleep(RETRY_PAUSE_S)
            if self._now() > min(deadline, alone_until):
                reason = f"No image service of the model {message.model!r} answers. Try again shortly."
                raise ServiceError("no_vision", reason, retry_after_s=1.0)

    async def open_stream(self, detokenizer: Address, message: OpenStream) -> None:
        """Opens a stream. Raises PeerUnavailableError, or ServiceError if the detokenizer refuses."""
        await self._ask(self._subjects.detokenizer_control(*detokenizer), encode(message), _ACK, limits.OPEN_TIMEOUT_S)

    async def open_batch(self, detokenizer: Address, batch: bytes) -> OpenBatchReply:
        """Sends an encoded `OpenBatch`. Raises PeerUnavailableError or ServiceError if the whole batch fails."""
        reply = await self._ask(self._subjects.detokenizer_control(*detokenizer), batch, _OPENED, limits.OPEN_TIMEOUT_S)
        assert isinstance(reply, OpenBatchReply)
        return reply

    async def submit_batch(self, engine: Address, batch: bytes) -> SubmitBatchReply:
        """Sends an encoded `SubmitBatch`. Raises PeerUnavailableError or ServiceError if the whole batch fails.

        Sends the batch once more if the engine is unavailable. This is safe: for a sequence that it already has, the
        engine answers `duplicate`.
        """
        timeout_s = limits.SUBMIT_TIMEOUT_S + len(batch) / limits.SUBMIT_BYTES_PER_S
        try:
            reply = await self._ask(self._subjects.engine_control(*engine), batch, _SUBMITTED, timeout_s)
        except PeerUnavailableError:
            reply = await self._ask(self._subjects.engine_control(*engine), batch, _SUBMITTED, timeout_s)
        assert isinstance(reply, SubmitBatchReply)
        return reply

    async def probe(self, service: str, member: Address, timeout_s: float) -> ProbeResult:
        """Asks an engine or a detokenizer whether it is there.

        `gone`: nobody subscribes to its subject any more, so its process has ended. `silent`: no answer in time.
        """
        is_engine = service == "engine"
        subject = self._subjects.engine_control(*member) if is_engine else self._subjects.detokenizer_control(*member)
        nothing = SubmitBatch(()) if is_engine else OpenBatch(())
        try:
            await self._host.transport.request(subject, encode(nothing), timeout_s=timeout_s)
        except NoRespondersError:
            return "gone"
        except (RequestTimeoutError, ServiceError):
            return "silent"
        return "answers"

    async def ask_progress(self, engine: Address, sequences: tuple[SequenceRef, ...]) -> None:
        """Asks the engine for the progress of sequences. `ProgressReply` comes to this gateway's control subject."""
        here = self._host.id, self._host.instance_id
        reply_subject = self._subjects.gateway_control(*here)

        def query(part: Sequence[SequenceRef]) -> ProgressQuery:
            return ProgressQuery(*here, reply_subject, tuple(part))

        tell_in_parts(self._host.transport, self._subjects.engine_control(*engine), query, sequences)

    def tell_released(self, query: OwnershipQuery, released: Sequence[SequenceRef]) -> bool:
        """Answers an `OwnershipQuery`. Returns False, and tells nobody, if the answer would not go to its sender."""
        member, subjects = (query.member_id, query.member_instance_id), self._subjects
        if query.reply_subject not in (subjects.engine_control(*member), subjects.detokenizer_control(*member)):
            return False

        def reply(part: Sequence[SequenceRef]) -> OwnershipReply:
            return OwnershipReply(self._host.id, self._host.instance_id, tuple(part))

        tell_in_parts(self._host.transport, query.reply_subject, reply, released)
        return True

    async def retarget(self, engine: Address, message: Retarget) -> None:
        """Sends a sequence's tokens to another detokenizer.

        Raises PeerUnavailableError, or ServiceError('not_found') if the engine no longer holds the sequence.
        """
        await self._ask(self._subjects.engine_control(*engine), encode(message), _ACK, limits.OPEN_TIMEOUT_S)

    async def resend(self, engine: Address, sequence_id: str, attempt: int, position: int) -> None:
        """Asks for a sequence's tokens from `position` on again."""
        await self._tell(self._subjects.engine_control(*engine), Resend(sequence_id, attempt, position))

    async def self_test(self, engine: Address, message: SelfTest) -> None:
        """Asks an engine to test itself. `SelfTestReply` comes to the message's reply subject."""
        await self._tell(self._subjects.engine_control(*engine), message)

    async def done(self, engine: Address, sequence_id: str, attempt: int) -> None:
        """Tells the engine that it may forget a finished sequence."""
        await self._tell(self._subjects.engine_control(*engine), Done(sequence_id, attempt))

    async def cancel(self, engine: Address, sequence_id: str, attempt: int, reason: str) -> None:
        """Ends a sequence on an engine."""
        await self._tell(self._subjects.engine_control(*engine), Cancel(sequence_id, attempt, reason))

    async def close_stream(self, detokenizer: Address, sequence_id: str, attempt: int) -> None:
        """Closes a stream on a detokenizer."""
        await self._tell(self._subjects.detokenizer_control(*detokenizer), CloseStream(sequence_id, attempt))

    async def _tell(self, subject: str, message: Message) -> None:
        await self._host.transport.publish(subject, encode(message))

    async def _ask(self, subject: str, data: bytes, expected: Decoder[Message], timeout_s: float) -> Message:
        try:
            return await ask_encoded(self._host.transport, subject, data, expected, timeout_s=timeout_s)
        except (NoRespondersError, RequestTimeoutError) as error:
            raise PeerUnavailableError(subject) from error
        except ServiceError as error:
            if not error.retryable:
                raise
            raise PeerUnavailableError(subject) from error

    def _another_tokenizer(self, model: str, tried: set[str]) -> tuple[str, str]:
        """Returns the subject and the id of a tokenizer, or the subject of the queue group and no id."""
        alive = ready_members(self._members.alive("tokenizer", self._now()), model)
        fresh = [m for m in alive if m.id not in tried] or alive
        if not fresh:
            return self._subjects.tokenize(model), ""
        tried.add(fresh[0].id)
        return self._subjects.tokenizer_direct(fresh[0].id, fresh[0].instance_id), fresh[0].id
