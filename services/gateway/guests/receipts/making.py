"""Makes the receipt of a request that has ended. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from antiphon.services.gateway.path.guest import Running
from antiphon.services.gateway.path.sequence_state import SequenceState
from antiphon.shared.codec import unpack_ids
from antiphon.shared.receipts.document import (
    VERSION,
    EngineClaim,
    Evidence,
    ModelClaim,
    OutputClaim,
    PromptClaim,
    Receipt,
    digest,
    link_every,
    links,
    told_params,
)

UNKNOWN = EngineClaim()
"""An engine that this gateway did not know any more, or whose software is older than receipts."""


@dataclass(slots=True)
class EnginesUsed:
    """The engines of one request: each different claim once, and for each sequence the indices of its engines."""

    claims: list[EngineClaim] = field(default_factory=list[EngineClaim])
    by_sequence: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def add(self, index: int, claim: EngineClaim) -> None:
        """Records that an engine has computed a part of a sequence."""
        if claim not in self.claims:
            self.claims.append(claim)
        place, places = self.claims.index(claim), self.by_sequence.setdefault(index, [])
        if place not in places:
            places.append(place)


def receipt_of(running: Running, model: ModelClaim, engines: EnginesUsed, created: int) -> Receipt:
    """Returns the receipt of a request whose sequences have all ended. `created`: Unix seconds."""
    if not engines.claims:
        engines.add(0, UNKNOWN)
    outputs = [_output(running, one, engines.by_sequence.get(one.index, [0])) for one in running.sequences]
    return Receipt(
        version=VERSION,
        request_id=running.request.request_id,
        created=created,
        model=model,
        engines=engines.claims,
        prompts=[PromptClaim(digest(one.packed), one.num_tokens) for one in running.prompts],
        outputs=outputs,
        stop=list(running.request.output.stop),
    )


def evidence_of(running: Running) -> Evidence:
    """Returns the token ids of a request that has ended."""
    prompts = [unpack_ids(one.packed) for one in running.prompts]
    return Evidence(prompts, [one.token_ids for one in running.sequences])


def _output(running: Running, sequence: SequenceState, engines: Sequence[int]) -> OutputClaim:
    guests, every = running.request.guests, link_every(len(sequence.token_ids))
    resumed = () if guests.resumed is None else guests.resumed.token_ids[sequence.index]
    assert sequence.finish_reason is not None, f"{sequence.sequence_id} has not ended"
    return OutputClaim(
        prompt=sequence.index // running.request.num_sequences,
        params=told_params(running.messages.params(sequence.index)),
        num_tokens=len(sequence.token_ids),
        digest=digest(sequence.token_ids),
        link_every=every,
        links=links(sequence.token_ids, every),
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        begun=len(guests.begun),
        engines=list(engines),
        resumed=len(resumed),
    )
