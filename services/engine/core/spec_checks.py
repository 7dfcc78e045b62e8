"""Checks whether an engine could run a sequence if it were alone. Pure. Called by `core` for each new sequence."""

from antiphon.services.engine.core.plan import CoreLimits, EngineFacts
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.core.stopping import StopRules
from antiphon.shared.blocks import HASH_BYTES, is_salt_of
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.pooling import PoolingParams, generates_nothing
from antiphon.shared.parameters.pooling import check as check_pooling
from antiphon.shared.parameters.sampling import check_vocabulary


class SpecChecks:
    """What an engine with these limits and facts refuses."""

    def __init__(self, limits: CoreLimits, facts: EngineFacts) -> None:
        self._limits, self._facts = limits, facts
        # The last token of a sequence is sampled but never computed, so it needs no slot in a KV block.
        room = facts.paging.capacity(facts.num_blocks, limits.most_tokens)
        self.max_model_len = min(facts.max_model_len, room + 1)
        """Maximum tokens of a sequence, prompt and output: the model's limit or the whole pool's capacity, if lower."""
        self.max_prompt_len = min(facts.max_model_len, room)
        """Maximum tokens of a pooling sequence, which has no output."""

    def check(self, spec: SequenceSpec) -> None:
        """Raises ServiceError ('invalid_value', 'context_length_exceeded', …) for a sequence that could never run."""
        _require(bool(spec.prompt_token_ids), "prompt", "The prompt has no tokens.")
        if spec.adapters:
            self._check_adapters(spec)
        if spec.images:
            self._check_images(spec)
        if spec.pooling is not None:
            self._check_pooling(spec, spec.pooling)
        else:
            self._check_output(spec)
        if spec.kv_transfer_id:
            alone = spec.params.max_tokens == 1 and not spec.output_token_ids
            plain = spec.pooling is None and spec.params.beam is None and spec.params.prompt_logprobs is None
            _require(alone and plain, "kv_transfer_id", "A prompt that is computed for another engine has one output.")
        for token_ids in (spec.prompt_token_ids, spec.output_token_ids):
            in_range = not token_ids or (min(token_ids) >= 0 and max(token_ids) < self._facts.vocab_size)
            _require(in_range, "prompt", f"Token ids must be between 0 and {self._facts.vocab_size - 1}.")
        _require(
            all(len(block_hash) == HASH_BYTES for block_hash in spec.block_hashes),
            "block_hashes",
            f"Block hashes must have {HASH_BYTES} bytes.",
        )

    def check_beams(self, spec: SequenceSpec, rules: StopRules) -> None:
        """Raises ServiceError for a beam search that could not run even if it were alone."""
        assert spec.params.beam is not None
        width, num_prompt = spec.params.beam.width, spec.num_prompt_tokens
        widest = min(self._limits.max_num_seqs, self._facts.vocab_size - len(rules.end_token_ids))
        _require(width <= widest, "best_of", f"This engine runs at most {widest} beams: lower 'best_of'.")
        # All beams share the full blocks of the prompt. The last token of each beam is never computed.
        num_shared = num_prompt // self._facts.block_size
        num_all = -(-(num_prompt + rules.max_tokens - 1) // self._facts.block_size)
        num_blocks = num_shared + width * (num_all - num_shared)
        # Beams share columns of the prompt, as long as their windows reach it.
        most = self._facts.paging.most_columns(self._limits.most_tokens)
        num_columns = min(num_shared, most) + width * min(num_all - num_shared, most)
        num_blocks += self._facts.num_windowed_groups * num_columns
        _require(
            num_blocks <= self._facts.num_blocks,
            "max_tokens",
            f"{width} beams of up to {num_prompt + rules.max_tokens} tokens need {num_blocks} KV blocks, and this "
            f"engine has {self._facts.num_blocks}: lower 'max_tokens' or 'best_of'.",
        )

    def _check_adapters(self, spec: SequenceSpec) -> None:
        if spec.adapter is not None and not self._limits.max_loras:
            message = "This engine serves no LoRA adapters: start it with --enable-lora."
            raise ServiceError("unsupported_parameter", message, param="model")
        if spec.prompt_adapter is not None and not self._limits.max_prompt_adapters:
            message = "This engine serves no prompt adapters: start it with --enable-prompt-adapter."
            raise ServiceError("unsupported_parameter", message, param="model")
        if spec.prompt_adapter is not None and spec.params.prompt_logprobs is not None:
            message = "Log probabilities of the prompt cannot be reported behind a prompt adapter's virtual tokens."
            raise ServiceError("unsupported_parameter", message, param="prompt_logprobs")
        # Keys and values depend on the adapter. Without it in the salt, one adapter's blocks would be found for
        # another's prompts.
        named = all(is_salt_of(spec.cache_salt, adapter.version) for adapter in spec.adapters)
        _require(named, "cache_salt", "The salt must name the version of each adapter.")

    def _check_images(self, spec: SequenceSpec) -> None:
        if not self._facts.takes_images:
            message = "This engine takes text only: start it with --enable-mm."
            raise ServiceError("unsupported_parameter", message, param="messages")
        alone = spec.prompt_adapter is None and spec.pooling is None
        _require(alone, "messages", "Images work neither with prompt adapters nor for embeddings.")
        if spec.params.prompt_logprobs is not None:
            message = "Log probabilities of the prompt cannot be reported for a prompt with images."
            raise ServiceError("unsupported_parameter", message, param="prompt_logprobs")
        end = 0
        for image in spec.images:
            fits = image.start >= end and 0 < image.num_tokens - len(image.plain) == image.rows * image.columns
            end = image.start + image.num_tokens
            # Equal keys mean equal KV, so with an empty key another image's KV would be found.
            whole = fits and end <= len(spec.prompt_token_ids) and bool(image.key) and bool(image.embeddings)
            _require(whole, "messages", "The images do not lie in the prompt as the request says.")

    def _check_pooling(self, spec: SequenceSpec, pooling: PoolingParams) -> None:
        _require(not spec.output_token_ids, "prompt", "A pooling sequence has no output that it could continue.")
        check_pooling(pooling, self._facts.embedding_size, len(self._facts.labels))
        if spec.num_prompt_tokens > self.max_prompt_len:
            message = (
                f"{self._what_is_short()} takes at most {self.max_prompt_len} tokens, and the input has "
                f"{spec.num_prompt_tokens}. Shorten the input."
            )
            raise ServiceError("context_length_exceeded", message, param="prompt")

    def _check_output(self, spec: SequenceSpec) -> None:
        if not self._facts.generates:
            raise generates_nothing(len(self._facts.labels))
        num_prompt, num_output = spec.num_prompt_tokens, len(spec.output_token_ids)
        if num_prompt + num_output >= self.max_model_len:
            raise ServiceError("context_length_exceeded", self._too_long(num_prompt + num_output), param="prompt")
        _require(
            num_output < spec.params.max_tokens,
            "max_tokens",
            f"'max_tokens' is {spec.params.max_tokens}, and {num_output} tokens have been generated already.",
        )
        check_vocabulary(spec.params, self._facts.vocab_size)

    def _too_long(self, num_tokens: int) -> str:
        return (
            f"{self._what_is_short()} takes at most {self.max_model_len} tokens, prompt and output together, and the "
            f"prompt has {num_tokens}, which leaves no room for output. Shorten the prompt."
        )

    def _what_is_short(self) -> str:
        whole_context = self.max_model_len == self._facts.max_model_len
        return "This model" if whole_context else "This engine's cache"


def _require(ok: bool, param: str, message: str) -> None:
    if not ok:
        raise ServiceError("invalid_value", message, param=param)
