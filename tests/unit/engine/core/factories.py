"""Small cores, sequences and results for tests of the engine core: no model, made-up tokens, blocks of four tokens."""

from typing import Any

from antiphon.services.engine.core import invariants
from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.plan import CoreLimits, EngineFacts, SampledLogprobs, StepPlan, StepResult
from antiphon.services.engine.core.request import Outcome, SequenceSpec
from antiphon.shared.parameters.sampling import SamplingParams

EOS = 2
VOCAB_SIZE = 1000


def make_core(
    num_blocks: int = 32,
    *,
    block_size: int = 4,
    max_num_seqs: int = 4,
    budget: int = 64,
    chunked: bool = True,
    caching: bool = True,
    max_model_len: int = 256,
    num_host_blocks: int = 0,
    num_stages: int = 1,
    num_states: int = 0,
    interval: int = 8,
    has_draft_layer: bool = False,
    **others: Any,
) -> Core:
    """`others` are further limits. `interval`: tokens from one snapshot of a recurrent state to the next."""
    limits = CoreLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
        **others,
    )
    facts = EngineFacts(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS}),
        num_host_blocks=num_host_blocks,
        num_stages=num_stages,
        num_states=num_states,
        state_interval=interval if num_states else 0,
        has_draft_layer=has_draft_layer,
    )
    return Core(limits, facts)


def prompt_of(length: int, first: int = 100) -> tuple[int, ...]:
    """A prompt that shares no block with one of another `first`, a hundred away."""
    return tuple(range(first, first + length))


def spec(
    sequence_id: str,
    prompt: tuple[int, ...],
    *,
    max_tokens: int = 50,
    output: tuple[int, ...] = (),
    hashes: tuple[bytes, ...] = (),
    salt: bytes = b"",
    priority: int = 0,
    arrival: int = 0,
    sequence_group: str = "",
    **params: object,
) -> SequenceSpec:
    return SequenceSpec(
        sequence_id=sequence_id,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
        output_token_ids=output,
        block_hashes=hashes,
        cache_salt=salt,
        priority=priority,
        arrival=arrival,
        sequence_group=sequence_group,
    )


def answer(plan: StepPlan, *token_ids: int | tuple[int, ...], logprob: float = -0.5) -> StepResult:
    """A result with the given tokens for the plan's samples in order; the last one serves all that follow."""
    num_samples = sum(share.samples for share in plan.scheduled)
    given = [token if isinstance(token, tuple) else (token,) for token in token_ids or (7,)]
    tokens = tuple(given[min(index, len(given) - 1)] for index in range(num_samples))
    return StepResult(
        step=plan.step, token_ids=tokens, logprobs=tuple((SampledLogprobs(logprob),) * len(each) for each in tokens)
    )


def step(core: Core, *token_ids: int | tuple[int, ...]) -> tuple[StepPlan, list[Outcome]]:
    """One whole step, checked on the way."""
    plan = core.schedule()
    invariants.check(core)
    outcomes = core.apply(plan, answer(plan, *token_ids))
    invariants.check(core)
    return plan, outcomes


def shares(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    """Row, start, number of tokens and whether it samples, of each scheduled sequence."""
    return [(share.row, share.start, share.num_tokens, share.samples) for share in plan.scheduled]


def joined(plan: StepPlan) -> dict[str, tuple[int, ...]]:
    """The block tables of the sequences that join, by request id."""
    return {new.sequence_id: new.block_ids for new in plan.new}
