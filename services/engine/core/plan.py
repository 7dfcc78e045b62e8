"""The data types between scheduler and worker: the plan of one step and its result.

A worker keeps a state table with one row (batch slot) for each running sequence, `--max-num-seqs` rows in all. A plan
holds only changes: a sequence that joins is sent completely and gets a row; for other sequences only new blocks are
listed. The worker appends each sampled token to the sequence's row itself, so that it already has the input of the next
step. For the beams of a beam search this token is not used: the core chooses each beam's next token, and the hypothesis
that it continues, from the reported candidates. Each plan therefore frees the rows of the beams that it schedules and
fills them again. Token ranges and fields of a scheduled sequence:

    [0, start)                  computed before: the KV is in the blocks, or is written by this step for another
                                sequence that shares the blocks; in each layer, all keys and values of a step are
                                written before any are read
    [start, start + num_tokens) computed by this step
    `samples`                   whether the range reaches the last known token, so that the next token is sampled
    `draft_token_ids`           draft tokens after the last known token. They are the end of the range and are computed
                                like known tokens. The worker samples after the last known token and after each draft
                                token, and returns the sampled tokens up to and including the first that differs from
                                its draft token: at least one
    `pools`                     whether the range reaches the last token of a pooling sequence, so that its vector is
                                complete and returned. A pooling sequence never samples
"""

from dataclasses import dataclass, field

import msgspec

from antiphon.services.engine.core.paging import MUTUAL_TOKENS, WHOLE, Paging
from antiphon.shared.messages import PromptLogprobs
from antiphon.shared.parameters.pooling import PoolingKind, PoolingParams
from antiphon.shared.parameters.sampling import SamplingParams

DEFAULT_BATCHED_TOKENS = 2048
"""Token budget of a step on a GPU if `--max-num-batched-tokens` is not given."""
CPU_PROMPT_TOKENS = 1024
"""Prompt tokens of a step on a CPU, in addition to one token for each running sequence. With a larger budget steps take
longer and all sequences wait longer, with hardly more throughput. A worker that is as fast with fewer tokens sets
`EngineFacts.step_prompt_tokens`.
"""


PROMPT_LOGPROBS_BYTES = 32 * 2**20
"""Maximum bytes of logits in a step for log probabilities of prompts. A longer prompt with them takes more steps."""
PROMPT_LOGPROBS_ROWS_MAX = 256
"""Maximum number of prompt tokens with log probabilities in a step. It is the lower limit for small vocabularies; with
more tokens in a step, a prompt would hardly be faster.
"""


def prompt_logprob_rows(vocab_size: int) -> int:
    """Returns for how many prompt tokens a step reports log probabilities at most."""
    return min(PROMPT_LOGPROBS_ROWS_MAX, max(1, PROMPT_LOGPROBS_BYTES // (4 * vocab_size)))


def default_batched_tokens(on_cpu: bool, max_num_seqs: int) -> int:
    """Returns the token budget of a step if `--max-num-batched-tokens` is not given."""
    return CPU_PROMPT_TOKENS + max_num_seqs if on_cpu else DEFAULT_BATCHED_TOKENS


class PlacedImage(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """An image in a prompt: tokens [start, start + num_tokens) of the prompt.

    `rows` and `columns`: how the embedded tokens lie in the image, row by row. `embeddings`: those of these tokens,
    in order, [rows * columns, width] numbers of the type `dtype` (as torch names it) as bytes. `width` is hidden * (1 +
    `DecoderDescription.image_layers`): a token has its embedding, followed by the embeddings that those layers add to
    their outputs.
    """

    start: int
    num_tokens: int
    rows: int
    columns: int
    key: bytes
    """Equal keys mean equal embeddings."""
    embeddings: bytes
    dtype: str
    plain: tuple[int, ...] = ()
    """Positions among the image's tokens that use the embedding of their own token id, not one of the image."""


class NewSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that joins, or comes back after preemption, or a beam with other tokens, and the row that it gets.

    `token_ids` are prompt and output so far; the first `num_prompt_tokens` are the prompt. `block_ids` is the whole
    block table so far. The data stay valid until the row is freed.
    """

    row: int
    sequence_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    block_ids: tuple[int, ...]
    window_ids: tuple[int, ...] = ()
    """In a model with several groups of layers (`DecoderDescription.kv_groups`): the blocks of the further groups for
    the last blocks of the table, those that the window of the next token reaches. Column by column: for each block
    of the table one block of each further group."""
    params: SamplingParams
    pooling: PoolingParams | None = None
    """Set for a pooling sequence, with its `kind` set. Its tokens are computed from the first if that kind needs it."""
    adapter_slot: int = -1
    """The slot of the sequence's LoRA adapter (`StepPlan.adapters`); -1: the sequence has none."""
    prompt_adapter: str = ""
    """Version of the sequence's prompt adapter. The first tokens are then its virtual tokens: their ids start at the
    vocabulary's size, and their embeddings are the vectors of the adapter.
    """
    images: tuple[PlacedImage, ...] = ()
    """The images of the prompt. The ids of their tokens are consecutive numbers, starting at the vocabulary's size.
    """


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One sequence's share of a step. `new_block_ids` are appended to the row's block table before the step runs.

    For a sequence that joins in this plan `new_block_ids` is empty, as `NewSequence.block_ids` has all its blocks.
    """

    row: int
    start: int
    num_tokens: int
    samples: bool
    new_block_ids: tuple[int, ...] = ()
    new_window_ids: tuple[int, ...] = ()
    """As `NewSequence.window_ids`, for each of `new_block_ids`."""
    draft_token_ids: tuple[int, ...] = ()
    num_prompt_logprobs: int = 0
    """Number of leading tokens of the range, all in the prompt, after which the log probabilities of the next token of
    the prompt are reported."""
    pools: bool = False
    state: int = -1
    """In a model with recurrent states: the slot of the state before the range; -1: the range begins the sequence."""
    num_drafts: int = -1
    """With a draft layer: how many draft tokens it predicts after the sampled tokens; 0: none, but it computes the
    range, whose entries it needs for later ones; -1: it leaves the sequence out."""
    states: tuple[tuple[int, int], ...] = ()
    """In such a model: (number of tokens of the range, slot to which the state after them is written), in ascending
    order; the last one is after the whole range. The last slot may be `state`, which then is read first."""


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step.

    Order of effects: free rows, fill adapter slots, copy blocks, fill rows, append blocks, compute, sample tokens,
    predict draft tokens.

    Copies run in three groups: to the host, then from the host, then from block to block. No block is the target of two
    copies of a plan, so that each group may be one operation.
    """

    step: int
    freed_rows: tuple[int, ...] = ()
    new: tuple[NewSequence, ...] = ()
    scheduled: tuple[ScheduledSequence, ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    """(block, host block)"""
    swap_in: tuple[tuple[int, int], ...] = ()
    """(host block, block)"""
    copies: tuple[tuple[int, int], ...] = ()
    """(source block, target block): for a sequence that reuses the partly filled block of another one and must write
    into its copy.
    """
    num_tokens: int = 0
    """Number of scheduled tokens. At most the token budget, except for a single long prompt without chunked prefill."""
    num_prompt_logprobs: int = 0
    """Sum of `ScheduledSequence.num_prompt_logprobs`; at most `prompt_logprob_rows`."""
    adapters: tuple[tuple[int, str], ...] = ()
    """(slot, version) of each adapter slot to fill before the step. No plan in flight uses the former adapter of the
    slot.
    """

    @property
    def drafts(self) -> bool:
        """Whether the draft layer computes after the model: if it predicts tokens, or computes parts of prompts."""
        return any(
            share.num_drafts > 0 or (share.num_drafts == 0 and share.num_tokens > 1 + len(share.draft_token_ids))
            for share in self.scheduled
        )

    @property
    def empty(self) -> bool:
        """Whether the plan has nothing to compute."""
        return not self.scheduled

    @property
    def copies_blocks(self) -> bool:
        """Whether the plan copies blocks, in any of the three groups."""
        return bool(self.swap_out or self.swap_in or self.copies)


class SampledLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log probabilities of a sampled token and of the best candidates, best first (raw distribution)."""

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a step: for each scheduled sequence with `samples`, in plan order, one tuple of new tokens.

    The tuple has more than one token if draft tokens were accepted, and none if the sequence waits for the mask of its
    grammar. Its last known token is then to be computed again; no plan in flight may contain the sequence. `logprobs`
    is parallel to `token_ids` and always holds the log probabilities of the new tokens; it holds candidates only for
    sequences that asked for them.
    """

    step: int
    token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: tuple[tuple[SampledLogprobs, ...], ...] = ()
    failed: tuple[tuple[int, str], ...] = ()
    """(index in `token_ids`, message for the user) of each sequence for which no token could be sampled. Its tokens in
    this result are to be ignored.
    """
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """For each scheduled sequence with `num_prompt_logprobs`, in plan order."""
    vectors: tuple[bytes, ...] = ()
    """For each scheduled sequence with `pools`, in plan order, its vector (`TokenEvent.vector`)."""
    draft_token_ids: tuple[tuple[int, ...], ...] = ()
    """If `StepPlan.drafts`: parallel to `token_ids`, the draft tokens after them, at most
    `ScheduledSequence.num_drafts`."""
    draft_s: float = 0.0
    """Seconds that the draft layer took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Properties of model and machine that are determined at start-up and passed to the core."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = field(default_factory=frozenset[int])
    num_host_blocks: int = 0
    """Number of KV blocks in the host's memory for preempted sequences."""
    step_tokens: int = DEFAULT_BATCHED_TOKENS
    """Token budget of a step if `--max-num-batched-tokens` is not given."""
    step_prompt_tokens: int | None = None
    """Limit of the step's tokens in addition to those that running sequences decode; None: no limit but the budget."""
    computes_on_host: bool = True
    """Whether threads of this process compute the steps. If False, a device computes and the threads wait for it."""
    configuration: str = ""
    """Hash of everything besides the weights that can change tokens: data types, backend, hardware, software."""
    content: str = ""
    """Hash of the weights, their quantization and the compute data type: engines with equal hashes may exchange KV."""
    numerics: str = ""
    """What decides the last bits of a result, in words: backend, instruction set, quantization and data types. Engines
    with equal words and weights compute equal tokens if they are batch invariant."""
    embedding_size: int = 0
    """Number of components of a pooling sequence's vector; 0 if the worker cannot compute such vectors."""
    pooling_kind: PoolingKind = "last"
    """Default kind of pooling."""
    generates: bool = True
    """Whether the model can generate tokens. False for a model without a language model head."""
    labels: tuple[str, ...] = ()
    """Names of the labels of the model's classification head, in the order of its outputs; empty: it has none."""
    computes_whole: bool = False
    """Whether every sequence is computed in a single step, without KV, because tokens attend to later tokens."""
    num_windowed_groups: int = 0
    """Number of groups of layers whose blocks are freed when the window has passed (`kv.windows`)."""
    window: int = 0
    """Number of tokens that a query sees at most in these layers, itself included."""
    num_states: int = 0
    """Number of slots of recurrent states (`kv.states`); 0: the model has none."""
    state_pieces: int = 0
    """Number of pieces of the size of a block as which a recurrent state travels between engines; 0: it does not."""
    state_interval: int = 0
    """Number of tokens between the snapshots of a sequence's recurrent state."""
    keeps_states: bool = False
    """Whether the worker keeps a state for each row that can be continued but not truncated. Then prefixes cannot be
    reused, and there are no draft tokens.
    """
    has_draft_layer: bool = False
    """Whether the worker has a layer that predicts draft tokens."""
    max_rows: int | None = None
    """Maximum number of sequences for which the worker has memory; None: `--max-num-seqs`."""
    takes_images: bool = False
    """Whether prompts may contain images."""
    mutual_images: bool = False
    """Whether the tokens of an image attend to each other in both directions. Then a step must contain all tokens of
    the image.
    """
    num_stages: int = 1
    """Number of pipeline stages. With several stages, that many plans are computed at the same time, so a plan cannot
    contain a token that another plan in flight samples.
    """
    variant_because: str = ""
    """Reason why the last bits of a sequence's log probabilities may depend on the other sequences of a step; empty:
    they do not (the backend is batch invariant).
    """

    @property
    def paging(self) -> Paging:
        """How many blocks sequences take."""
        together = MUTUAL_TOKENS if self.mutual_images else 0
        return Paging(self.block_size, self.num_windowed_groups, self.window, together)

    def own_pooling(self) -> PoolingParams:
        """Returns the parameters of a pooling sequence that any model without generation can compute."""
        return PoolingParams(kind=self.pooling_kind, classify=bool(self.labels))


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimits:
    """The scheduler's limits, from flags."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    kv_cache_ratio: float | None = None
    """Maximum share of the KV blocks that may be in use after a sequence joins running ones; None: all blocks."""
    scheduler_delay_factor: float = 0.0
    """Factor of the wait between admissions; see `delay`."""
    num_speculative_tokens: int = 0
    """Maximum number of draft tokens of a sequence in a step; 0: no drafts. See `drafts.drafter`."""
    use_lookahead: bool = True
    """Whether draft tokens also come from a sequence's own text (`drafts.prompt_lookup`)."""
    max_batch_size: int | None = None
    """Maximum number of new sequences in a gathered batch; None: sequences do not gather. See `batching`."""
    batch_wait_timeout: float = 0.1
    """Maximum time for which a batch gathers, in seconds."""
    step_prompt_tokens: int | None = None
    """Limit of the step's tokens besides one token and its drafts for each running sequence; None: only the budget."""
    max_loras: int = 0
    """Maximum number of LoRA adapters of the running sequences together; 0: sequences have no adapters."""
    max_prompt_adapters: int = 0
    """As `max_loras`, for prompt adapters."""
    has_canary_row: bool = False
    """Whether the worker has one row more than `max_num_seqs`, for the canary (`SequenceSpec.canary`)."""

    @property
    def most_tokens(self) -> int:
        """Number of tokens of one sequence that a step computes at most."""
        return self.max_num_batched_tokens if self.enable_chunked_prefill else WHOLE

    def step_tokens(self, num_running: int, num_drafting: int) -> int:
        """Returns the token budget of a step with `num_running` sequences, of which `num_drafting` may get drafts."""
        if self.step_prompt_tokens is None:
            return self.max_num_batched_tokens
        num_draft_tokens = min(num_drafting, num_running) * self.num_speculative_tokens
        return min(self.max_num_batched_tokens, num_running + num_draft_tokens + self.step_prompt_tokens)
