"""The messages that place a request's sequences: what engines and detokenizers are told of each. Pure; others send."""

from services.gateway.generation import GenerationRequest, ModelCard
from services.gateway.requests.prompts import Prompt, sequence_params
from services.gateway.requests.sequence_state import SequenceState
from shared import limits
from shared.actors.host import Host
from shared.codec import TOKEN_BYTES, pack_ids
from shared.messages import OpenStream, Retarget, Submit

PROMPT_TAIL_BYTES = TOKEN_BYTES * limits.PROMPT_TAIL_TOKENS


class RequestMessages:
    """One request's prompts and sequences. Sequence index = prompt index * n + choice."""

    def __init__(self, host: Host, request: GenerationRequest, card: ModelCard, prompts: list[Prompt]) -> None:
        self.request, self.card, self.prompts = request, card, prompts
        count = len(prompts) * request.n
        self.sequences = [SequenceState(sequence_id(request.request_id, index)) for index in range(count)]
        self._host = host

    def prompt(self, index: int) -> Prompt:
        """The prompt of a sequence."""
        return self.prompts[index // self.request.n]

    def choices(self, index: int) -> list[SequenceState]:
        """The sequences of the same prompt, this one too."""
        first = index - index % self.request.n
        return self.sequences[first : first + self.request.n]

    def open_stream(self, index: int) -> OpenStream:
        """A stream from what the gateway has on. The sequence has a place."""
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
        )

    def submit(self, index: int) -> Submit:
        """A sequence with the tokens so far as output. The sequence has a place."""
        request, sequence, host, prompt = self.request, self.sequences[index], self._host, self.prompt(index)
        assert sequence.detokenizer is not None
        choices = self.choices(index)
        return Submit(
            sequence.sequence_id,
            sequence.attempt,
            host.id,
            host.instance_id,
            host.subjects.detokenizer_tokens(*sequence.detokenizer),
            prompt.packed,
            sequence_params(request.params, index % request.n, prompt.num_tokens, self.card),
            pack_ids(sequence.token_ids),
            prompt.block_hashes,
            request.cache_salt,
            request.priority,
            choices[0].sequence_id if len(choices) > 1 else "",
            request.trace_headers.get("traceparent", ""),
            request.trace_headers.get("tracestate", ""),
        )

    def retarget(self, index: int) -> Retarget:
        """Tokens go to the sequence's present detokenizer, from the first one on that the gateway does not have."""
        sequence = self.sequences[index]
        assert sequence.detokenizer is not None
        sink = self._host.subjects.detokenizer_tokens(*sequence.detokenizer)
        return Retarget(sequence.sequence_id, sequence.attempt, sink, len(sequence.token_ids))


def sequence_id(request_id: str, index: int) -> str:
    """The bus name of one sequence of a request."""
    return f"{request_id}-{index}"


def split_sequence_id(name: str) -> tuple[str, int]:
    """The request and index behind a sequence's bus name. Raises ValueError for a foreign name."""
    request_id, _, index = name.rpartition("-")
    return request_id, int(index)
