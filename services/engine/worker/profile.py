"""What a step takes beside weights and cache: measured with made-up steps before the cache is sized.

    drawing     what is made of the logits of rows that draw at the same time
    sampling    logits, log probabilities and penalties, which grow with the tokens that are sampled
    passing     the forward pass, which grows with the tokens of a step and, in attention, with the context behind them

Each has a step of its own, small on a CPU, where time counts, and as large as a step can be on a device. What is
measured is scaled up by rows or by tokens: what does not grow with them is then counted more than once, never less.
Context beyond what the steps look back on is added by formula. Plans and arithmetic only; the worker runs the plans.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.engine.core.plan import DEFAULT_BATCHED_TOKENS, NewSequence, ScheduledSequence, StepPlan
from services.engine.kernels.paged_attention import TILE_QUERIES
from services.engine.models.description import DecoderDescription
from services.engine.worker.kv_cache import KvPlan, context_length
from services.engine.worker.memory import peak_growth
from services.engine.worker.sampler import SLICE_BYTES
from shared import limits
from shared.config import EngineSettings
from shared.sampling import SamplingParams

CPU_TOKENS_MAX = 256
CPU_ROWS_MAX = 64
CPU_CONTEXT_MAX = 2048
"""A small model's steps of this size take about a tenth of a second together."""


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The largest step: tokens that it computes, rows that it holds, tokens that it samples, tokens of one context."""

    num_tokens: int
    num_rows: int
    num_samples: int
    context: int


def largest_step(settings: EngineSettings, description: DecoderDescription) -> StepBounds:
    """What the scheduler may plan at most with these flags. Raises `ServiceError` for an impossible context."""
    context, rows = context_length(settings, description), settings.max_num_seqs
    tokens = max(settings.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS, rows)
    if not settings.enable_chunked_prefill:
        tokens = max(tokens, context)
    guesses = settings.num_speculative_tokens if settings.use_lookahead else 0
    return StepBounds(tokens, rows, max(rows, min(tokens, rows * (1 + guesses))), context)


@dataclass(frozen=True, slots=True)
class Step:
    """A made-up step that stands for one `times` as large."""

    plan: StepPlan
    times: float


@dataclass(frozen=True, slots=True)
class Probe:
    """Steps to measure in a cache of their own, `kv`. What the largest step takes is the sum of what they stand for."""

    kv: KvPlan
    steps: tuple[Step, ...]
    unseen_context: int
    """Tokens that the largest step looks back on beyond what these do."""


def make_probe(bounds: StepBounds, description: DecoderDescription, block_size: int, device: torch.device) -> Probe:
    """Steps as large as they may be on a device, and such that starting up stays fast on a CPU."""
    on_cpu = device.type == "cpu"
    context = min(bounds.context, CPU_CONTEXT_MAX) if on_cpu else bounds.context
    tokens = min(bounds.num_tokens, context, CPU_TOKENS_MAX if on_cpu else bounds.num_tokens)
    rows = min(bounds.num_rows, CPU_ROWS_MAX) if on_cpu else bounds.num_rows
    # On a CPU the sampler draws for some rows at a time, and what that takes is there once.
    at_once = max(1, SLICE_BYTES // (4 * description.vocab_size)) if on_cpu else bounds.num_samples
    most_at_once = min(bounds.num_samples, at_once)
    drawing = min(rows, most_at_once)
    blocks = max(rows, 1 - (-tokens // block_size))
    steps = (
        Step(_sampling(rows, description.vocab_size, 0.0), bounds.num_samples / rows),
        Step(_sampling(drawing, description.vocab_size, 1.0), most_at_once / drawing),
        Step(_passing(tokens, context, block_size, blocks), bounds.num_tokens / tokens),
    )
    return Probe(KvPlan(blocks, context), steps, bounds.context - context)


def step_bytes(
    probe: Probe,
    run: Callable[[StepPlan], object],
    bounds: StepBounds,
    description: DecoderDescription,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """What the largest step takes at its peak. `run` carries out a plan in a state made for `probe.kv`."""
    peak = peak_growth if device.type == "cpu" else _device_peak(device)
    # What is slow or large only the first time belongs to the libraries, and touched rows to the tables.
    run(probe.steps[0].plan)
    measured = sum(int(peak(lambda plan=step.plan: run(plan)) * step.times) for step in probe.steps)
    return measured + probe.unseen_context * _bytes_per_context_token(bounds.num_tokens, description, dtype)


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


def _bytes_per_context_token(num_tokens: int, description: DecoderDescription, dtype: torch.dtype) -> int:
    """What attention takes for a token that a step looks back on; see `kernels/paged_attention.py`."""
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
