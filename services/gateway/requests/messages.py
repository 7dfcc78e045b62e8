"""Builds the messages that place a request's sequences on engines and detokenizers. Pure: does not send them."""

import msgspec

from services.gateway.generation import GenerationRequest, ModelCard
from services.gateway.requests.prompts import Prompt, sequence_params
from services.gateway.requests.sequence_state import SequenceState
from shared import limits
from shared.actors.host import Host
from shared.codec import TOKEN_BYTES, pack_ids
from shared.messages import OpenStream, Retarget, Submit

PROMPT_TAIL_BYTES = TOKEN_BYTES * limits.PROMPT_TAIL_TOKENS


class RequestMessages:
    """Builds the messages of one request. Sequence index = prompt index * n + choice."""

    def __init__(self, host: Host, request: GenerationRequest, card: ModelCard, prompts: list[Prompt]) -> None:
        self.request, self.card, self.prompts = request, card, prompts
        count = len(prompts) * request.n
        self.sequences = [SequenceState(sequence_id(request.request_id, index)) for index in range(count)]
        self._host = host

    def prompt(self, index: int) -> Prompt:
        """Returns the prompt of a sequence."""
        return self.prompts[index // self.request.n]

    def choices(self, index: int) -> list[SequenceState]:
        """Returns all sequences of the same prompt, including the given one."""
        first = index - index % self.request.n
        return self.sequences[first : first + self.request.n]

    def open_stream(self, index: int) -> OpenStream:
        """Returns the message that opens a stream, which continues the text that the gateway has.

        The sequence must have a placement.
        """
        request, sequence, host = self.request, self.sequences[index], self._host
        assert sequence.engine is not None
        return OpenStream(
            sequence.sequence_id,
            sequence.attempt,
            self.card.name,
            host.subjects.gateway_text(host.id, host.instance_id),
            host.subjects.engine_control(*sequence.engine),
            self.prompt(index).packed[-PROMPT_TAIL_BYTES:],
            pack_ids(sequence.token_ids),
            sequence.text_length,
            request.stop,
            request.include_stop_str_in_output,
            request.skip_special_tokens,
            request.params.min_tokens,
            request.trace_headers.get("traceparent", ""),
            request.trace_headers.get("tracestate", ""),
            request.spaces_between_special_tokens,
            request.detokenize,
            request.shown_special_tokens,
        )

    def submit(self, index: int) -> Submit:
        """Returns the message that runs a sequence, with its tokens so far as output. It must have a placement."""
        request, sequence, host, prompt = self.request, self.sequences[index], self._host, self.prompt(index)
        assert sequence.detokenizer is not None
        choices = self.choices(index)
        params = sequence_params(request.params, index % request.n, prompt.num_tokens, self.card)
        return Submit(
            sequence.sequence_id,
            sequence.attempt,
            host.id,
            host.instance_id,
            host.subjects.detokenizer_tokens(*sequence.detokenizer),
            prompt.packed,
            msgspec.structs.replace(params, end_token_ids=prompt.end_token_ids),
            pack_ids(sequence.token_ids),
            prompt.block_hashes,
            request.cache_salt,
            request.priority,
            choices[0].sequence_id if len(choices) > 1 else "",
            request.trace_headers.get("traceparent", ""),
            request.trace_headers.get("tracestate", ""),
            request.client.name,
            request.client.weight,
            request.client.priority,
        )

    def retarget(self, index: int) -> Retarget:
        """Returns the message that sends the tokens which the gateway lacks to the sequence's current detokenizer."""
        sequence = self.sequences[index]
        assert sequence.detokenizer is not None
        sink = self._host.subjects.detokenizer_tokens(*sequence.detokenizer)
        return Retarget(sequence.sequence_id, sequence.attempt, sink, len(sequence.token_ids))


def sequence_id(request_id: str, index: int) -> str:
    """Returns the id of one sequence of a request."""
    return f"{request_id}-{index}"


def split_sequence_id(name: str) -> tuple[str, int]:
    """Returns the request id and the index of a sequence id. Raises ValueError for an id of another form."""
    request_id, _, index = name.rpartition("-")
    return request_id, int(index)
