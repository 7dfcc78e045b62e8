"""What the gateway says to the other services: one typed call for each message, with its time-outs and retries."""

import asyncio

from services.gateway.owner import Address
from services.gateway.placement import ready_members
from shared import limits
from shared.actors.actor import ask
from shared.actors.host import Host
from shared.actors.presence import Members
from shared.actors.transport import Headers, NoRespondersError, RequestTimeoutError
from shared.codec import Decoder, encode
from shared.errors import ServiceError
from shared.messages import (
    Ack,
    Cancel,
    CloseStream,
    DetokenizeReply,
    DetokenizeRequest,
    Done,
    ErrorReply,
    Message,
    OpenStream,
    Retarget,
    Submit,
    SubmitReply,
    TokenizeReply,
    TokenizeRequest,
)

_TOKENIZED = Decoder([TokenizeReply, DetokenizeReply, ErrorReply])
_ACK = Decoder([Ack, ErrorReply])
_SUBMITTED = Decoder([SubmitReply, ErrorReply])
TOKENIZE_CHARS_PER_S = 250_000
"""Slower than any tokenizer here: the time-out grows with the text."""
FIRST_TRY_S = 0.3
RETRY_PAUSE_S = 0.05


class PeerUnavailableError(Exception):
    """The peer does not answer (it is gone, frozen or cut off) or has no room: another may."""


class Peers:
    """The other services as seen from one gateway."""

    def __init__(self, host: Host, members: Members) -> None:
        self._host = host
        self._members = members

    async def tokenizer(
        self, message: TokenizeRequest | DetokenizeRequest, size: int, headers: Headers | None
    ) -> Message:
        """Asks the model's pool; a replica that does not answer costs a retry on one that is known to live.

        `size` is the text's characters or the list's tokens. Raises ServiceError.
        """
        deadline = self._now() + limits.QUEUE_WAIT_S
        subject, attempt, tried = self._host.subjects.tokenize(message.model), 0, set[str]()
        while True:
            timeout_s = FIRST_TRY_S * 2 ** min(attempt, 4) + size / TOKENIZE_CHARS_PER_S
            try:
                return await ask(
                    self._host.transport, subject, message, _TOKENIZED, timeout_s=timeout_s, headers=headers
                )
            except (NoRespondersError, RequestTimeoutError):
                attempt += 1
                if self._now() > deadline:
                    told = f"No tokenizer of the model {message.model!r} answers. Try again shortly."
                    raise ServiceError("no_tokenizer", told, retry_after_s=1.0) from None
                subject = self._another_tokenizer(message.model, tried)
                await asyncio.sleep(RETRY_PAUSE_S)

    async def open_stream(self, detokenizer: Address, message: OpenStream, headers: Headers | None) -> None:
        """Raises PeerUnavailableError, or ServiceError when the detokenizer refuses."""
        subject = self._host.subjects.detokenizer_control(*detokenizer)
        await self._ask(subject, message, _ACK, limits.OPEN_TIMEOUT_S, headers)

    async def submit(self, engine: Address, message: Submit, headers: Headers | None) -> SubmitReply:
        """Asks twice: an engine that has the sequence already answers `duplicate`. Raises PeerUnavailableError."""
        subject = self._host.subjects.engine_control(*engine)
        try:
            reply = await self._ask(subject, message, _SUBMITTED, limits.SUBMIT_TIMEOUT_S, headers)
        except PeerUnavailableError:
            reply = await self._ask(subject, message, _SUBMITTED, limits.SUBMIT_TIMEOUT_S, headers)
        assert isinstance(reply, SubmitReply)
        return reply

    async def retarget(self, engine: Address, message: Retarget) -> None:
        """Raises PeerUnavailableError, or ServiceError('not_found') when the engine no longer holds the sequence."""
        await self._ask(self._host.subjects.engine_control(*engine), message, _ACK, limits.OPEN_TIMEOUT_S, None)

    async def done(self, engine: Address, request_id: str, epoch: int) -> None:
        """Lets the engine forget a finished sequence."""
        await self._tell(self._host.subjects.engine_control(*engine), Done(request_id, epoch))

    async def cancel(self, engine: Address, request_id: str, epoch: int, reason: str) -> None:
        """Ends a sequence on an engine."""
        await self._tell(self._host.subjects.engine_control(*engine), Cancel(request_id, epoch, reason))

    async def close_stream(self, detokenizer: Address, request_id: str, epoch: int) -> None:
        """Lets a detokenizer forget a stream."""
        await self._tell(self._host.subjects.detokenizer_control(*detokenizer), CloseStream(request_id, epoch))

    async def _tell(self, subject: str, message: Message) -> None:
        await self._host.transport.publish(subject, encode(message))

    async def _ask(
        self, subject: str, message: Message, expected: Decoder[Message], timeout_s: float, headers: Headers | None
    ) -> Message:
        try:
            return await ask(self._host.transport, subject, message, expected, timeout_s=timeout_s, headers=headers)
        except (NoRespondersError, RequestTimeoutError) as error:
            raise PeerUnavailableError(subject) from error
        except ServiceError as error:
            if not error.retryable:
                raise
            raise PeerUnavailableError(subject) from error

    def _another_tokenizer(self, model: str, tried: set[str]) -> str:
        alive = ready_members(self._members.alive("tokenizer", self._now()), model)
        fresh = [m for m in alive if m.id not in tried] or alive
        if not fresh:
            return self._host.subjects.tokenize(model)
        tried.add(fresh[0].id)
        return self._host.subjects.tokenizer_direct(fresh[0].id, fresh[0].boot)

    def _now(self) -> float:
        return self._host.clock.monotonic()
