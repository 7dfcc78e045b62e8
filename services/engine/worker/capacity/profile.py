"""Measures the memory that a step needs besides weights and KV cache, with artificial steps, before the cache is sized.

    drawing     the buffers for rows that are sampled (not greedy) at the same time
    sampling    logits, log probabilities and penalties, which grow with the number of sampled tokens
    passing     the forward pass, which grows with the tokens of a step and, in attention, with their context; not
                measured if the backend knows its size

Each part is measured with its own step: a small one on a CPU, to start up fast, the largest possible one on a GPU. The
memory of the forward pass is scaled up in proportion to the tokens, which overestimates the part that does not grow
with them. Each sampled token beyond those measured counts as much as the last ones measured. Context beyond that of the
measured steps is added by formula. This module makes the plans and does the arithmetic; the worker runs the plans.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from antiphon.services.engine.core.plan import (
    NewSequence,
    ScheduledSequence,
    StepPlan,
    prompt_logprob_rows,
)
from antiphon.services.engine.kernels.paged_attention import TILE_QUERIES
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.worker.batch.sampler import SLICE_BYTES
from antiphon.services.engine.worker.capacity.context import context_length
from antiphon.services.engine.worker.capacity.kv_cache import KvPlan
from antiphon.services.engine.worker.capacity.memory import peak_growth
from antiphon.services.engine.worker.capacity.paging import batched_tokens, paging_of
from antiphon.shared import limits
from antiphon.shared.config import EngineSettings
from antiphon.shared.parameters.sampling import SamplingParams

CPU_TOKENS_MAX = 256
CPU_ROWS_MAX = 32
CPU_CONTEXT_MAX = 2048
"""Limits of the measured steps on a CPU. All of them together take about 0.1 s with a small model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBounds:
    """The largest step: number of computed tokens, of rows, of sampled tokens, and tokens of the longest context.

    `num_reported`: number of prompt tokens whose log probabilities it reports. `num_drafts`: draft tokens of a
    sequence.
    """

    num_tokens: int
    num_rows: int
    num_samples: int
    context: int
    num_reported: int = 0
    num_drafts: int = 0

    @property
    def num_logits(self) -> int:
        """Number of tokens whose logits it computes."""
        return min(self.num_tokens, self.num_samples + self.num_reported)


def largest_step(settings: EngineSettings, description: DecoderDescription, on_cpu: bool = False) -> StepBounds:
    """Returns the largest step that the scheduler can plan. Raises `ServiceError` for an impossible context length."""
    context, rows = context_length(settings, description), settings.scheduler.max_num_seqs
    tokens = batched_tokens(settings, on_cpu=on_cpu)
    if not settings.scheduler.enable_chunked_prefill:
        tokens = max(tokens, context)
    # A step computes the image that it has begun as a whole, even beyond its budget.
    tokens += min(paging_of(settings, description).together, context)
    drafts = settings.scheduler.use_lookahead or settings.scheduler.use_mtp
    num_draft_tokens = settings.scheduler.num_speculative_tokens if drafts else 0
    samples = max(rows, min(tokens, rows * (1 + num_draft_tokens)))
    return StepBounds(
        num_tokens=tokens,
        num_rows=rows,
        num_samples=samples,
        context=context,
        num_reported=min(tokens, prompt_logprob_rows(description.vocab_size)),
        num_drafts=num_draft_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The steps to measure, in a temporary KV cache `kv`, and how much larger the largest step is."""

    kv: KvPlan
    passing: StepPlan
    more_tokens: float
    """Tokens of the largest step divided by tokens of `passing`."""
    drawing: StepPlan
    more_draws: float
    """Rows that are sampled at once in the largest step, divided by the rows of `drawing`."""
    few: StepPlan
    many: StepPlan
    """`few` and `many`: sampling for some rows and for more rows."""
    unseen_rows: int
    """Sampled tokens of the largest step minus those of `many`."""
    row_bytes_min: int
    """Lower bound for the bytes of one sampled token."""
    reported_bytes: int
    """Bytes of the logits for log probabilities of prompts. They are not measured: float32 values and the 16-bit ones
    that they are made from, and on a device a copy of the float32 values."""


def make_probe(bounds: StepBounds, description: DecoderDescription, block_size: int, device: torch.device) -> Probe:
    """Returns the steps to measure: the largest ones on a GPU, small ones on a CPU so that start-up stays fast."""
    on_cpu, vocab_size = device.type == "cpu", description.vocab_size
    has_states = description.recurrent is not None
    context = min(bounds.context, CPU_CONTEXT_MAX) if on_cpu else bounds.context
    tokens = min(bounds.num_tokens, context, CPU_TOKENS_MAX if on_cpu else bounds.num_tokens)
    # On a CPU the sampler processes a few rows at a time and reuses the memory.
    at_once = min(bounds.num_samples, max(1, SLICE_BYTES // (4 * vocab_size)) if on_cpu else bounds.num_samples)
    few = min(bounds.num_rows, at_once, CPU_ROWS_MAX if on_cpu else bounds.num_rows)
    many = min(bounds.num_rows, 2 * few)
    blocks = max(many, 1 - (-tokens // block_size))
    return Probe(
        kv=KvPlan(blocks, context),
        passing=_passing(tokens, context, block_size, blocks, has_states),
        more_tokens=bounds.num_tokens / tokens,
        drawing=_sampling(few, vocab_size, 1.0, has_states),
        more_draws=at_once / few,
        few=_sampling(few, vocab_size, 0.0, has_states),
        many=_sampling(many, vocab_size, 0.0, has_states),
        unseen_rows=bounds.num_samples - many,
        row_bytes_min=2 * 4 * vocab_size,
        reported_bytes=(6 if on_cpu else 10) * vocab_size * bounds.num_reported,
    )


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Peak bytes of the largest step, and bytes added by each token of context beyond the measured context."""

    fixed: int
    seen_context: int
    per_token: int

    def at(self, context: int) -> int:
        """Returns the peak, in bytes, for contexts of up to `context` tokens."""
        return self.fixed + self.per_token * max(0, context - self.seen_context)


def measure_step(
    probe: Probe,
    run: Callable[[StepPlan], object],
    bytes_per_context_token: int,
    device: torch.device,
    passing: int | None = None,
) -> StepBytes:
    """Measures the steps of a probe. `run` runs a plan in a state created for `probe.kv`.

    `passing`: bytes of the largest forward pass, if the backend knows them. Otherwise the forward pass is measured
    first, because a backend may keep the buffers that it allocates.
    """

    def peak(plan: StepPlan) -> int:
        measure = peak_growth if device.type == "cpu" else _device_peak(device)
        return measure(lambda: run(plan))

    if passing is None:
        if device.type == "cpu":
            # The growth of the process in its first step includes what libraries load once, whatever the tokens.
            run(probe.few)
        passing = int(peak(probe.passing) * probe.more_tokens)
    # Run once unmeasured, so that pages of the state table that are written for the first time are not counted below.
    run(probe.many)
    drawing = int(peak(probe.drawing) * probe.more_draws)
    few, many = peak(probe.few), peak(probe.many)
    more = probe.many.num_tokens - probe.few.num_tokens
    each = max(probe.row_bytes_min, (many - few) // more if more else -(-many // probe.many.num_tokens))
    fixed = passing + drawing + many + each * probe.unseen_rows + probe.reported_bytes
    return StepBytes(fixed, probe.kv.max_model_len, bytes_per_context_token)


def _passing(num_tokens: int, context: int, block_size: int, num_blocks: int, has_states: bool) -> StepPlan:
    """Returns a plan of the last `num_tokens` tokens of one sequence, without sampling.

    The computed tokens have separate slots; the context before them reuses the same blocks.
    """
    blocks = tuple(index % num_blocks for index in range(-(-context // block_size)))
    new = NewSequence(
        row=0,
        sequence_id="",
        token_ids=(0,) * context,
        num_prompt_tokens=context,
        block_ids=blocks,
        params=SamplingParams(max_tokens=1),
    )
    share = ScheduledSequence(
        row=0,
        start=context - num_tokens,
        num_tokens=num_tokens,
        samples=False,
        num_drafts=0,
        states=((num_tokens, 0),) if has_states else (),
    )
    return StepPlan(step=1, new=(new,), scheduled=(share,), num_tokens=num_tokens)


def _sampling(num_rows: int, vocab_size: int, temperature: float, has_states: bool) -> StepPlan:
    """Returns a plan of one token for each of `num_rows` sequences, sampled with all sampling options on."""
    params = SamplingParams(
        max_tokens=2,
        min_tokens=1,
        temperature=temperature,
        top_k=vocab_size - 1,
        top_p=0.95,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        logprobs=limits.LOGPROBS_MAX,
    )
    new = tuple(
        NewSequence(row=row, sequence_id="", token_ids=(0,), num_prompt_tokens=1, block_ids=(row,), params=params)
        for row in range(num_rows)
    )
    shares = tuple(
        ScheduledSequence(row=row, start=0, num_tokens=1, samples=True, states=((1, row),) if has_states else ())
        for row in range(num_rows)
    )
    return StepPlan(step=1, new=new, scheduled=shares, num_tokens=num_rows)


def bytes_per_context_token(num_tokens: int, description: DecoderDescription, dtype: torch.dtype) -> int:
    """Returns the bytes that `kernels/paged_attention.py` needs for each token of context in a step of `num_tokens`."""
    size, d = dtype.itemsize, description
    # Gathered keys and values; 8-bit ones exist before and after the conversion to the model's type.
    gathered = d.cache_parts * d.kv_size * (size + 1)
    if d.latent is not None:
        # Latent attention: keys with their rotated part, computed from latents, and values padded to the width of keys.
        a = d.latent
        gathered += d.num_heads * (a.nope_dim + a.value_dim + 2 * a.query_dim) * size
    # A mask and the two booleans it is made from, for each query and distinct window; with ALiBi for each head too.
    masks = (size + 2) * num_tokens * len(set(d.sliding_windows))
    if d.alibi_scale is not None:
        masks *= 2 * d.num_heads
    scores = 3 * 4 * d.num_heads * TILE_QUERIES if d.attention_softcap is not None or d.attention_sinks else 0
    return gathered + masks + scores


def _device_peak(device: torch.device) -> Callable[[Callable[[], object]], int]:
    """Returns a function that runs work and returns its peak, in bytes, of memory reserved by the allocator.

    Reserved memory includes the gaps between tensors; the allocator does not return it to the device.
    """

    def peak(work: Callable[[], object]) -> int:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_reserved(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_reserved(device) - before

    return peak
