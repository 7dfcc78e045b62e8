"""Makes the content of a request's record: what it takes to run the request again. Pure."""

import time
from collections.abc import Sequence

from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard
from antiphon.services.gateway.path.messages import Prompt
from antiphon.services.gateway.path.sequence_state import SequenceState
from antiphon.shared.blocks import root_hash
from antiphon.shared.codec import unpack_ids
from antiphon.shared.recorded_request import RecordedContent, RecordedPrompt, RecordedSequence, encode


def content_of(
    request: GenerationRequest, card: ModelCard, prompts: Sequence[Prompt], sequences: Sequence[SequenceState]
) -> bytes:
    """Returns the content of a request as JSON. `request`: with its parameters as they were sent to engines."""
    output = request.output
    return encode(
        RecordedContent(
            request_id=request.request_id,
            created=time.time(),
            model=card.name,
            path=card.path,
            max_model_len=card.max_model_len,
            configuration=list(card.configuration),
            adapter_version=card.adapter_version,
            params=request.params,
            n=request.n,
            num_sequences=request.num_sequences,
            stop=list(output.stop),
            include_stop_str_in_output=output.include_stop_str_in_output,
            skip_special_tokens=output.skip_special_tokens,
            spaces_between_special_tokens=output.spaces_between_special_tokens,
            detokenize=output.detokenize,
            shown_special_tokens=list(output.shown_special_tokens),
            begun=list(request.guests.begun),
            num_images=len(request.inputs.images),
            block_root=root_hash(request.cache_salt).hex(),
            prompts=[RecordedPrompt(unpack_ids(one.packed), list(one.end_token_ids)) for one in prompts],
            sequences=[
                RecordedSequence(list(one.token_ids), one.finish_reason, one.stop_reason, list(one.engines))
                for one in sequences
            ],
        )
    )
