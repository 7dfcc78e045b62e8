"""What a step takes beside weights and cache: measured with made-up steps before the cache is sized.

    drawing     what is made of the logits of rows that draw at the same time
    sampling    logits, log probabilities and penalties, which grow with the tokens that are sampled
    passing     the forward pass, which grows with the tokens of a step and, in attention, with the context behind them
                (not measured of a backend that knows what it takes)

Each has a step of its own, small on a CPU, where time counts, and as large as a step can be on a device. The forward
pass is scaled up by tokens: what does not grow with them is then counted more than once, never less. Samples beyond
those measured cost what the last ones cost; context beyond what the steps look back on is added by formula. Plans and
arithmetic only; the worker runs the plans.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.engine.core.plan import NewSequence, ScheduledSequence, StepPlan, default_batched_tokens
from services.engine.kernels.paged_attention import TILE_QUERIES
from services.engine.models.description import DecoderDescription
from services.engine.worker.kv_cache import KvPlan, context_length
from services.engine.worker.memory import peak_growth
from services.engine.worker.sampler import SLICE_BYTES
from shared import limits
from shared.config import EngineSettings
from shared.sampling import SamplingParams

CPU_TOKENS_MAX = 256
CPU_ROWS_MAX = 32
CPU_CONTEXT_MAX = 2048
"""A small model's steps of this size take about a tenth of a second together."""


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The largest step: tokens that it computes, rows that it holds, tokens that it samples, tokens of one context."""

    num_tokens: int
    num_rows: int
    num_samples: int
    context: int


def largest_step(settings: EngineSettings, description: DecoderDescription, on_cpu: bool = False) -> StepBounds:
    """What the scheduler may plan at most with these flags. Raises `ServiceError` for an impossible context."""
    context, rows = context_length(settings, description), settings.max_num_seqs
    tokens = max(settings.max_num_batched_tokens or default_batched_tokens(on_cpu, rows), rows)
    if not settings.enable_chunked_prefill:
        tokens = max(tokens, context)
    guesses = settings.num_speculative_tokens if settings.use_lookahead else 0
    return StepBounds(tokens, rows, max(rows, min(tokens, rows * (1 + guesses))), context)


@dataclass(frozen=True, slots=True)
class Probe:
    """Steps to measure in a cache of their own, `kv`, and how much larger the largest step is."""

    kv: KvPlan
    passing: StepPlan
    more_tokens: float
    """The largest step's tokens for each of `passing`."""
    drawing: StepPlan
    more_draws: float
    """The rows that draw at once for each of `drawing`."""
    few: StepPlan
    many: StepPlan
    """Sampling, for some rows and for more."""
    unseen_rows: int
    """Samples of the largest step beyond those of `many`."""
    row_bytes_min: int
    """What a sample takes at least."""


def make_probe(bounds: StepBounds, description: DecoderDescription, block_size: int, device: torch.device) -> Probe:
    """Steps as large as they may be on a device, and such that starting up stays fast on a CPU."""
    on_cpu, vocab_size = device.type == "cpu", description.vocab_size
    context = min(bounds.context, CPU_CONTEXT_MAX) if on_cpu else bounds.context
    tokens = min(bounds.num_tokens, context, CPU_TOKENS_MAX if on_cpu else bounds.num_tokens)
    # On a CPU the sampler works on some rows at a time, and what that takes is there once.
    at_once = min(bounds.num_samples, max(1, SLICE_BYTES // (4 * vocab_size)) if on_cpu else bounds.num_samples)
    few = min(bounds.num_rows, at_once, CPU_ROWS_MAX if on_cpu else bounds.num_rows)
    many = min(bounds.num_rows, 2 * few)
    blocks = max(many, 1 - (-tokens // block_size))
    return Probe(
        kv=KvPlan(blocks, context),
        passing=_passing(tokens, context, block_size, blocks),
        more_tokens=bounds.num_tokens / tokens,
        drawing=_sampling(few, vocab_size, 1.0),
        more_draws=at_once / few,
        few=_sampling(few, vocab_size, 0.0),
        many=_sampling(many, vocab_size, 0.0),
        unseen_rows=bounds.num_samples - many,
        row_bytes_min=2 * 4 * vocab_size,
    )


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What the largest step takes at its peak, and what each token of context beyond those measured adds."""

    fixed: int
    seen_context: int
    per_token: int

    def at(self, context: int) -> int:
        """For contexts up to this long."""
        return self.fixed + self.per_token * max(0, context - self.seen_context)


def measure_step(
    probe: Probe,
    run: Callable[[StepPlan], object],
    bytes_per_context_token: int,
    device: torch.device,
    passing: int | None = None,
) -> StepBytes:
    """`run` carries out a plan in a state made for `probe.kv`. `passing`: what a backend knows of the forward pass.

    The forward pass comes first: a backend may keep the buffers that it grows.
    """

    def peak(plan: StepPlan) -> int:
        measure = peak_growth if device.type == "cpu" else _device_peak(device)
        return measure(lambda: run(plan))

    if passing is None:
        passing = int(peak(probe.passing) * probe.more_tokens)
    # Rows of the tables that are touched for the first time are counted with these.
    run(probe.many)
    drawing = int(peak(probe.drawing) * probe.more_draws)
    few, many = peak(probe.few), peak(probe.many)
    more = probe.many.num_tokens - probe.few.num_tokens
    each = max(probe.row_bytes_min, (many - few) // more if more else -(-many // probe.many.num_tokens))
    return StepBytes(
        passing + drawing + many + each * probe.unseen_rows, probe.kv.max_model_len, bytes_per_context_token
    )


def _passing(num_tokens: int, context: int, block_size: int, num_blocks: int) -> StepPlan:
    """One sequence's last tokens, none of them sampled. They have places of their own, the context shares those."""
    blocks = tuple(index % num_blocks for index in range(-(-context // block_size)))
    new = NewSequence(0, "", (0,) * context, context, blocks, SamplingParams(max_tokens=1))
    share = ScheduledSequence(0, context - num_tokens, num_tokens, samples=False)
    return StepPlan(1, new=(new,), scheduled=(share,), num_tokens=num_tokens)


def _sampling(num_rows: int, vocab_size: int, temperature: float) -> StepPlan:
    """One token of many sequences, sampled with everything that a request can ask for."""
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
    new = tuple(NewSequence(row, "", (0,), 1, (row,), params) for row in range(num_rows))
    shares = tuple(ScheduledSequence(row, 0, 1, samples=True) for row in range(num_rows))
    return StepPlan(1, new=new, scheduled=shares, num_tokens=num_rows)


def bytes_per_context_token(num_tokens: int, description: DecoderDescription, dtype: torch.dtype) -> int:
    """What `kernels/paged_attention.py` takes for a token that a step of `num_tokens` looks back on."""
    size, d = dtype.itemsize, description
    # Gathered keys and values, those of 8 bits before and after they are widened.
    gathered = 2 * d.kv_size * (size + 1)
    # A mask and the two truth values that it is made of, for each query and kind of window, or for each head.
    masks = (size + 2) * num_tokens * len(set(d.sliding_windows))
    if d.alibi_scale is not None:
        masks *= 2 * d.num_heads
    scores = 3 * 4 * d.num_heads * TILE_QUERIES if d.attention_softcap is not None else 0
    return gathered + masks + scores


def _device_peak(device: torch.device) -> Callable[[Callable[[], object]], int]:
    """What the allocator takes from the device, pieces between tensors included: what it takes it keeps."""

    def peak(work: Callable[[], object]) -> int:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_reserved(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_reserved(device) - before

    return peak
