"""Builds the messages that place a request's sequences on engines and detokenizers. Pure: does not send them."""

from dataclasses import dataclass

import msgspec

from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard
from antiphon.services.gateway.path.record import NOT_RECORDED
from antiphon.services.gateway.path.sequence_state import SequenceState
from antiphon.shared import limits
from antiphon.shared.actors.host import Host
from antiphon.shared.codec import TOKEN_BYTES, pack_ids
from antiphon.shared.messages import OpenStream, PromptImage, Retarget, Submit
from antiphon.shared.parameters.pooling import PoolingParams
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.request.choices import choice_params

PROMPT_TAIL_BYTES = TOKEN_BYTES * limits.PROMPT_TAIL_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt. `packed`: its token ids as little-endian u32; `block_hashes`: the chain of hashes of its full blocks.

    `end_token_ids` end its outputs in addition to the model's own end tokens. `tail`: the last characters of a
    rendered conversation; empty for other prompts.
    """

    packed: bytes
    block_hashes: bytes
    end_token_ids: tuple[int, ...] = ()
    tail: str = ""
    images: tuple[PromptImage, ...] = ()
    num_first_tokens: int = 0
    """For a pair of texts: see `PoolingParams`."""

    @property
    def num_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.packed) // TOKEN_BYTES


class RequestMessages:
    """Builds the messages of one request. Sequence index = prompt index * num_sequences + choice."""

    def __init__(self, host: Host, request: GenerationRequest, card: ModelCard, prompts: list[Prompt]) -> None:
        self.request, self.card, self.prompts = request, card, prompts
        self._host = host
        self.idle_until = host.clock.monotonic() + idle_s if (idle_s := request.guests.idle_s) > 0 else 0.0
        """Time at which the sequences leave the idle lane, monotonic seconds; 0: they are not in it."""
        self._num_choices = request.num_sequences
        self.sequences = list(map(self._sequence, range(len(prompts) * self._num_choices)))

    def _sequence(self, index: int) -> SequenceState:
        # The first sequence of each prompt reports the log probabilities of the prompt.
        reports = self.request.params.prompt_logprobs is not None and index % self._num_choices == 0
        num_reported = self.prompt(index).num_tokens if reports else 0
        name, guests = sequence_id(self.request.request_id, index), self.request.guests
        if (resumed := guests.resumed) is None:
            tokens = list(guests.begun)
            return SequenceState(sequence_id=name, index=index, num_prompt_logprobs=num_reported, token_ids=tokens)
        return SequenceState(
            sequence_id=name,
            index=index,
            num_prompt_logprobs=num_reported,
            attempt=resumed.fence * limits.ATTEMPTS_PER_RUN,
            token_ids=list(resumed.token_ids[index]),
            num_cached_tokens=resumed.num_cached_tokens[index] or 0,
            cumulative_logprob=resumed.cumulative_logprobs[index],
        )

    def prompt(self, index: int) -> Prompt:
        """Returns the prompt of a sequence."""
        return self.prompts[index // self._num_choices]

    def choices(self, index: int) -> list[SequenceState]:
        """Returns all sequences of the same prompt, including the given one."""
        first = index - index % self._num_choices
        return self.sequences[first : first + self._num_choices]

    def params(self, index: int) -> SamplingParams:
        """Returns the parameters of a sequence as engines get them: its own seed, and a limit that fits."""
        prompt = self.prompt(index)
        params = self.request.params.within(self.card.max_model_len - prompt.num_tokens)
        if self._num_choices > 1:
            params = choice_params(params, index % self._num_choices)
        if prompt.end_token_ids:
            params = msgspec.structs.replace(params, end_token_ids=prompt.end_token_ids)
        return params

    def open_stream(self, index: int) -> OpenStream:
        """Returns the message that opens a text stream, which continues after the text that the gateway has.

        The sequence must have a placement.
        """
        request, sequence, host = self.request, self.sequences[index], self._host
        text, headers = request.output, request.origin.trace_headers
        assert sequence.engine is not None
        return OpenStream(
            sequence_id=sequence.sequence_id,
            attempt=sequence.attempt,
            model=self.card.served_by,
            reply_subject=host.subjects.gateway_text(host.id, host.instance_id),
            engine_subject=host.subjects.engine_control(*sequence.engine),
            prompt_token_ids=self.prompt(index).packed[-PROMPT_TAIL_BYTES:],
            output_token_ids=pack_ids(sequence.token_ids),
            text_offset=sequence.text_length,
            stop=text.stop,
            include_stop_str_in_output=text.include_stop_str_in_output,
            skip_special_tokens=text.skip_special_tokens,
            min_tokens=request.params.min_tokens,
            traceparent=headers.get("traceparent", ""),
            tracestate=headers.get("tracestate", ""),
            spaces_between_special_tokens=text.spaces_between_special_tokens,
            detokenize=text.detokenize,
            shown_special_tokens=text.shown_special_tokens,
        )

    def submit(self, index: int) -> Submit:
        """Returns the message that runs a sequence, with its tokens so far as output. The sequence must be placed."""
        request, sequence, host, prompt = self.request, self.sequences[index], self._host, self.prompt(index)
        choices, client, headers = self.choices(index), request.origin.client, request.origin.trace_headers
        params = self.params(index)
        if params.prompt_logprobs is not None and not sequence.needs_prompt_logprobs:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return Submit(
            sequence_id=sequence.sequence_id,
            attempt=sequence.attempt,
            gateway_id=host.id,
            gateway_instance_id=host.instance_id,
            reply_subject=self._reply_subject(sequence),
            prompt_token_ids=prompt.packed,
            params=params,
            output_token_ids=pack_ids(sequence.token_ids),
            block_hashes=prompt.block_hashes,
            cache_salt=request.cache_salt,
            priority=request.priority,
            sequence_group=choices[0].sequence_id if len(choices) > 1 else "",
            traceparent=headers.get("traceparent", ""),
            tracestate=headers.get("tracestate", ""),
            client=client.name,
            client_weight=client.weight,
            client_priority=client.priority,
            pooling=None if request.pooling is None else _pooling(request.pooling, prompt),
            recorded=request.origin.record is not NOT_RECORDED,
            kv_source=None if sequence.prefill is None else sequence.prefill.source,
            adapter=self.card.name if self.card.adapter_version else "",
            adapter_version=self.card.adapter_version,
            images=prompt.images,
            idle_s=self._idle_s() if self.idle_until else 0.0,
            kv_keep_s=request.kv_keep_s,
        )

    def _idle_s(self) -> float:
        return max(0.0, self.idle_until - self._host.clock.monotonic())

    def submit_prefill(self, index: int) -> Submit:
        """Returns the message that makes a prefill engine compute the prompt for the sequence's engine.

        The sequence must have a placement with such an engine.
        """
        request, sequence, host, prompt = self.request, self.sequences[index], self._host, self.prompt(index)
        client, headers = request.origin.client, request.origin.trace_headers
        assert sequence.prefill is not None
        return Submit(
            sequence_id=sequence.sequence_id,
            attempt=sequence.attempt,
            gateway_id=host.id,
            gateway_instance_id=host.instance_id,
            reply_subject="",
            prompt_token_ids=prompt.packed + pack_ids(sequence.token_ids),
            params=SamplingParams(temperature=0.0, max_tokens=1),
            block_hashes=prompt.block_hashes,
            cache_salt=request.cache_salt,
            priority=request.priority,
            traceparent=headers.get("traceparent", ""),
            tracestate=headers.get("tracestate", ""),
            client=client.name,
            client_weight=client.weight,
            client_priority=client.priority,
            kv_transfer_id=sequence.prefill.source.transfer_id,
            adapter=self.card.name if self.card.adapter_version else "",
            adapter_version=self.card.adapter_version,
            images=prompt.images,
            idle_s=self._idle_s() if self.idle_until else 0.0,
        )

    def submit_copy(
        self, index: int, name: str, attempt: int, output_token_ids: bytes, *, salt: bytes, only_next: bool
    ) -> Submit:
        """Returns the message that runs a copy of a sequence, whose tokens come to this gateway.

        The sequence must have a placement. `salt`: replaces the request's cache salt unless it is empty. `only_next`:
        only the token after `output_token_ids` is computed.
        """
        submit, host = self.submit(index), self._host
        params = msgspec.structs.replace(submit.params, prompt_logprobs=None, logprobs=None)
        if only_next:
            params = msgspec.structs.replace(params, max_tokens=len(output_token_ids) // TOKEN_BYTES + 1)
        return msgspec.structs.replace(
            submit,
            sequence_id=name,
            attempt=attempt,
            reply_subject=host.subjects.gateway_tokens(host.id, host.instance_id),
            params=params,
            output_token_ids=output_token_ids,
            block_hashes=b"" if salt else submit.block_hashes,
            cache_salt=salt or submit.cache_salt,
            sequence_group="",
            recorded=False,
            kv_source=None,
        )

    def retarget(self, index: int) -> Retarget:
        """Returns the message that makes the engine send the missing tokens to the sequence's current detokenizer.

        For a pooling sequence, it makes the engine send the vector to this gateway again.
        """
        sequence = self.sequences[index]
        return Retarget(sequence.sequence_id, sequence.attempt, self._reply_subject(sequence), len(sequence.token_ids))

    def _reply_subject(self, sequence: SequenceState) -> str:
        host = self._host
        if self.request.pooling is not None:
            return host.subjects.gateway_tokens(host.id, host.instance_id)
        assert sequence.detokenizer is not None
        return host.subjects.detokenizer_tokens(*sequence.detokenizer)


def _pooling(params: PoolingParams, prompt: Prompt) -> PoolingParams:
    """Returns the parameters of one prompt's pooling: with its own number of first tokens, if it is a pair of texts."""
    if not prompt.num_first_tokens:
        return params
    return msgspec.structs.replace(params, num_first_tokens=prompt.num_first_tokens)


def sequence_id(request_id: str, index: int) -> str:
    """Returns the id of one sequence of a request."""
    return f"{request_id}-{index}"
