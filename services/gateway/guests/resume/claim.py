"""A stream that a gateway takes over: its record, its known output, and the request that continues it."""

import time
from collections.abc import Collection
from typing import Any

import msgspec
from starlette.requests import Request

from antiphon.services.gateway.apis.openai.request_context import RequestContext, Resumption
from antiphon.services.gateway.edge.access.call import current_call
from antiphon.services.gateway.edge.http.shared_answers import receive_of
from antiphon.services.gateway.guests.resume.body_images import WholeBody
from antiphon.services.gateway.guests.resume.position import Position
from antiphon.services.gateway.guests.resume.positioned import PositionedEvents
from antiphon.services.gateway.guests.resume.record import Accepted, StreamRecord
from antiphon.services.gateway.path.generation import ResumedOutput
from antiphon.shared import limits
from antiphon.shared.actors.host import Host
from antiphon.shared.errors import ServiceError


class Claim:
    """A stream that this gateway has taken over and is about to run. It is passed to the endpoint with the request.

    `whole`: the body of the request, and files that it names by URL.
    """

    def __init__(
        self,
        record: StreamRecord,
        revision: int,
        accepted: list[Accepted],
        position: Position,
        whole: WholeBody,
    ) -> None:
        self.record = record
        self.whole = whole
        self.revision = revision
        self.accepted = accepted
        self.position = position

    @property
    def resumption(self) -> Resumption:
        """Returns what the endpoint needs to make the same request again."""
        return Resumption(self.record.created, self.record.seed, self.whole.fetched)

    def run(self, context: RequestContext) -> tuple[PositionedEvents, tuple[Accepted, ...], ResumedOutput]:
        """Returns the state of the new run: its events, the tokens that it begins with, and what engines continue."""
        count = context.num_sequences
        accepted = [*self.accepted, *(Accepted() for _ in range(count - len(self.accepted)))]
        replayed = tuple([_replayed(one, context) for one in accepted])
        token_ids = tuple([tuple(one.token_ids) for one in replayed])
        known = tuple([tuple(one.token_ids) for one in accepted])
        num_cached = tuple([one.num_cached if one.token_ids else None for one in accepted])
        events = PositionedEvents(self.record.request_id, count, self.position, token_ids, known, num_cached)
        resumed = ResumedOutput(
            token_ids=token_ids,
            cumulative_logprobs=tuple([one.cumulative_logprob for one in replayed]),
            num_cached_tokens=num_cached,
            fence=self.record.fence,
            engines=tuple([one.engine for one in accepted]),
        )
        return events, replayed, resumed


def is_recordable(context: RequestContext, body: bytes) -> bool:
    """Whether the output of a request, produced again, gives the same events, and its body is not too large."""
    wanted = context.request
    plain = wanted.num_sequences == wanted.n and wanted.params.beam is None and not wanted.output.only_echoes
    if not plain or wanted.params.prompt_logprobs is not None or context.num_sequences > limits.STREAM_SEQUENCES_MAX:
        return False
    return len(body) <= limits.STREAM_BODY_BYTES_MAX


def new_record(
    request: Request,
    context: RequestContext,
    host: Host,
    journal_from: int,
    *,
    outlives_client: bool,
    kept_headers: Collection[str] = (),
) -> StreamRecord:
    """Returns the record of a new stream, with the request's body and the path of its endpoint from `request.state`."""
    call = current_call()
    return StreamRecord(
        request_id=context.request.request_id,
        path=request.state.records,
        body=request.state.body,
        key_name=call.key.name,
        client_request_id=call.client_request_id,
        timeout=call.timeout,
        created=context.arrival.created,
        seed=context.request.params.seed,
        owner_id=host.id,
        owner_instance_id=host.instance_id,
        fence=1,
        renewed_at=time.time(),
        outlives_client=outlives_client,
        journal_from=journal_from,
        headers=tuple([(name, request.headers[name]) for name in sorted(kept_headers) if name in request.headers]),
    )


def claimed_record(
    record: StreamRecord,
    host: Host,
    accepted: list[Accepted],
    journal_from: int,
    *,
    owner_died: bool,
    num_events: int = 0,
) -> StreamRecord:
    """Returns the record of a stream that this gateway takes over.

    `accepted`: its known output; `num_events`: the number of its stored events of output.

    A stream counts its starts after the death of its gateway: the stream may be what gateways die of. Output that the
    former start did not have ends the count. Raises ServiceError('stream_expired') after the third start in vain.
    """
    num_known = max(0, num_events) + sum(len(one.token_ids) + one.ended for one in accepted)
    starts = 1 if num_known > record.num_known else record.starts + owner_died
    if starts > limits.STARTS_MAX:
        message = (
            f"The request was given up: it was started {limits.STARTS_MAX} times, and each time its gateway ended "
            "before it had further output. Send a request of another kind, for example a shorter one."
        )
        raise ServiceError("stream_expired", message, param="id")
    return msgspec.structs.replace(
        record,
        owner_id=host.id,
        owner_instance_id=host.instance_id,
        fence=record.fence + 1,
        renewed_at=time.time(),
        outlives_client=True,
        journal_from=journal_from,
        progress=tuple([one.progress(index) for index, one in enumerate(accepted)]),
        starts=starts,
        num_known=num_known,
    )


def uncounted(record: StreamRecord) -> StreamRecord:
    """Returns the record of a stream whose gateway leaves it in an orderly way: the gateway has not died of it."""
    return msgspec.structs.replace(record, starts=record.starts - 1)


def _replayed(accepted: Accepted, context: RequestContext) -> Accepted:
    """Returns the tokens after which a sequence continues: without the last ones if the sequence has ended with them.

    The engine computes those again and ends the sequence as before. With log probabilities everything is computed
    again, because the record has none.
    """
    if context.request.params.logprobs is not None:
        return Accepted()
    if accepted.ended:
        return accepted.without_last()
    found = Accepted()
    found.token_ids, found.num_cached = list(accepted.token_ids), accepted.num_cached
    found.cumulative_logprob, found.engine = accepted.cumulative_logprob, accepted.engine
    return found


def stored_request(claim: Claim) -> Request:
    """Returns the stream's original HTTP request, for its endpoint. Its connection stays open."""
    record = claim.record
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": record.path,
        "raw_path": record.path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(claim.whole.body)).encode()),
            *((name.encode("latin-1"), value.encode("latin-1")) for name, value in record.headers),
        ],
        "client": None,
        "server": None,
        "state": {"request_id": record.request_id, "claim": claim, "resumption": claim.resumption},
    }

    return Request(scope, receive_of(claim.whole.body))
