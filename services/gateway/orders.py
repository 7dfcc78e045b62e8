"""The messages that place a sequence: what detokenizer and engine are told of it. Pure; the request actor sends."""

from services.gateway.generation import GenerationRequest, ModelCard
from services.gateway.owner import SequenceOwner
from services.gateway.prompts import Prompt
from shared import limits
from shared.actors.host import Host
from shared.codec import TOKEN_BYTES, pack_ids
from shared.messages import OpenStream, Submit
from shared.sampling import SamplingParams

PROMPT_TAIL_BYTES = TOKEN_BYTES * limits.PROMPT_TAIL_TOKENS


def open_stream(
    host: Host, request: GenerationRequest, card: ModelCard, sequence: SequenceOwner, prompt: Prompt
) -> OpenStream:
    """A stream from what the owner has on."""
    assert sequence.engine is not None
    return OpenStream(
        sequence.request_id,
        sequence.epoch,
        card.name,
        host.subjects.gateway_text(host.id, host.boot),
        host.subjects.engine_control(*sequence.engine),
        prompt.packed[-PROMPT_TAIL_BYTES:],
        pack_ids(sequence.token_ids),
        sequence.text_length,
        request.stop,
        request.include_stop_str_in_output,
        request.skip_special_tokens,
        request.params.min_tokens,
    )


def submit(
    host: Host,
    request: GenerationRequest,
    sequence: SequenceOwner,
    prompt: Prompt,
    params: SamplingParams,
    family: str,
) -> Submit:
    """A sequence with the tokens so far as output. `family`: what the choices of its prompt are called together."""
    assert sequence.detokenizer is not None
    return Submit(
        sequence.request_id,
        sequence.epoch,
        host.id,
        host.boot,
        host.subjects.detokenizer_tokens(*sequence.detokenizer),
        prompt.packed,
        params,
        pack_ids(sequence.token_ids),
        prompt.block_hashes,
        request.cache_salt,
        request.priority,
        family,
    )
