import numpy as np
import pytest

from antiphon.services.engine.core.plan import NewSequence, ScheduledSequence, StepPlan
from antiphon.services.engine.sampling import masks
from antiphon.services.engine.worker.batch.inputs import flatten
from antiphon.services.engine.worker.batch.state_table import StateTable
from antiphon.shared.parameters.sampling import SamplingParams

BLOCK_SIZE = 4


def make_table() -> StateTable:
    return StateTable(4, 32, BLOCK_SIZE, 50, frozenset({1}))


def joins(row: int, tokens: range, blocks: tuple[int, ...], num_prompt: int | None = None) -> NewSequence:
    prompt = len(tokens) if num_prompt is None else num_prompt
    params = SamplingParams(presence_penalty=1.0, seed=-1)
    return NewSequence(
        row=row,
        sequence_id=f"r{row}",
        token_ids=tuple(tokens),
        num_prompt_tokens=prompt,
        block_ids=blocks,
        params=params,
    )


def test_a_plan_of_chunks_and_decodes_becomes_flat_arrays() -> None:
    table = make_table()
    new = (joins(2, range(10, 16), (7, 3)), joins(0, range(20, 23), (5,)), joins(3, range(30, 39), (1, 2, 9)))
    shares = (
        ScheduledSequence(row=2, start=4, num_tokens=2, samples=True),
        ScheduledSequence(row=0, start=2, num_tokens=1, samples=True),
        ScheduledSequence(row=3, start=0, num_tokens=6, samples=False),
    )
    plan = StepPlan(step=0, new=new, scheduled=shares, num_tokens=9)
    table.apply(plan)
    step = flatten(plan, table, BLOCK_SIZE)
    assert step.ids.tolist() == [14, 15, 22, 30, 31, 32, 33, 34, 35]
    assert step.positions.tolist() == [4, 5, 2, 0, 1, 2, 3, 4, 5]
    assert step.slot_mapping(BLOCK_SIZE).tolist() == [[12, 13, 22, 4, 5, 6, 7, 8, 9]]
    assert step.query_start_loc.tolist() == [0, 2, 3, 9]
    assert step.seq_lens.tolist() == [6, 3, 6]
    assert step.block_tables[:, :, :2].tolist() == [[[7, 3], [5, 0], [1, 2]]]
    assert step.logit_tokens.tolist() == [1, 2]
    assert step.rows.tolist() == [2, 0]


def test_a_sampled_token_is_the_next_steps_input_in_a_new_block() -> None:
    table = make_table()
    table.apply(StepPlan(step=0, new=(joins(1, range(10, 14), (6,)),)))
    table.append(np.array([1]), np.array([44]))
    plan = StepPlan(
        step=1,
        scheduled=(ScheduledSequence(row=1, start=4, num_tokens=1, samples=True, new_block_ids=(8,)),),
        num_tokens=1,
    )
    table.apply(plan)
    step = flatten(plan, table, BLOCK_SIZE)
    assert (step.ids.tolist(), step.positions.tolist(), step.slot_mapping(BLOCK_SIZE).tolist()) == ([44], [4], [[32]])


def test_a_row_that_is_taken_again_keeps_nothing_of_its_last_sequence() -> None:
    table = make_table()
    table.apply(StepPlan(step=0, new=(joins(1, range(10, 30), (1, 2, 3, 4, 5), num_prompt=2),)))
    table.apply(StepPlan(step=1, freed_rows=(1,), new=(joins(1, range(40, 43), (9,), num_prompt=1),)))
    batch = table.sampling(np.array([1]), np.array([0]))
    counts, in_prompt = batch.penalty_counts
    assert np.flatnonzero(counts[0]).tolist() == [41, 42]
    assert np.flatnonzero(in_prompt[0]).tolist() == [40]
    assert batch.output_positions.tolist() == [2]
    assert table.num_tokens[1] == 3


def test_penalty_counts_grow_with_the_output() -> None:
    table = make_table()
    table.apply(StepPlan(step=0, new=(joins(0, range(10, 12), (1,)),)))
    for token in (5, 6, 5):
        table.append(np.array([0]), np.array([token]))
    batch = table.sampling(np.array([0]), np.array([0]))
    assert batch.penalty_counts[0][0, [5, 6, 10]].tolist() == [2, 1, 0]
    assert batch.output_positions.tolist() == [3]


def test_end_tokens_of_the_model_and_of_the_template_are_barred_before_min_tokens() -> None:
    table = make_table()
    for row, ignore_eos, barred in ((0, False, [1, 7, 9]), (1, True, [9])):
        params = SamplingParams(min_tokens=1, stop_token_ids=(9,), end_token_ids=(7, 99), ignore_eos=ignore_eos)
        table.apply(
            StepPlan(
                step=0,
                new=(
                    NewSequence(
                        row=row,
                        sequence_id=f"r{row}",
                        token_ids=(10, 11),
                        num_prompt_tokens=2,
                        block_ids=(row + 1,),
                        params=params,
                    ),
                ),
            )
        )
        rows, offsets = np.array([row]), np.array([0])
        batch = table.with_adjustments(table.sampling(rows, offsets), rows, offsets)
        mask = batch.adjustments[0].mask
        assert mask is not None
        assert np.flatnonzero(masks.forbidden(mask, 50)).tolist() == barred


def test_a_token_that_fills_a_row_to_its_end_is_not_kept() -> None:
    table = make_table()
    table.apply(StepPlan(step=0, new=(joins(0, range(32), tuple(range(8))),)))
    table.append(np.array([0]), np.array([7]))
    assert table.num_tokens[0] == 32


def test_a_plan_past_the_known_tokens_is_a_broken_invariant() -> None:
    table = make_table()
    plan = StepPlan(
        step=0,
        new=(joins(0, range(3), (1,)),),
        scheduled=(ScheduledSequence(row=0, start=3, num_tokens=1, samples=True),),
        num_tokens=1,
    )
    table.apply(plan)
    with pytest.raises(AssertionError, match="past the known tokens"):
        flatten(plan, table, BLOCK_SIZE)


@pytest.mark.parametrize(
    ("params", "forbidden"),
    [
        (SamplingParams(min_tokens=5), [1]),
        (SamplingParams(min_tokens=5, eos_token_ids=(7, 8)), [7, 8]),
        (SamplingParams(min_tokens=5, eos_token_ids=(7, 8), stop_token_ids=(9,)), [7, 8, 9]),
        (SamplingParams(min_tokens=5, eos_token_ids=(7, 8), ignore_eos=True, stop_token_ids=(9,)), [9]),
        (SamplingParams(min_tokens=5, eos_token_ids=(7, 50)), [7]),
    ],
)
def test_before_min_tokens_the_tokens_that_would_end_the_sequence_are_forbidden(
    params: SamplingParams, forbidden: list[int]
) -> None:
    table = make_table()
    table.apply(
        StepPlan(
            step=0,
            new=(
                NewSequence(
                    row=0, sequence_id="r0", token_ids=(10, 11), num_prompt_tokens=2, block_ids=(1,), params=params
                ),
            ),
        )
    )
    row = np.array([0])
    mask = table.with_adjustments(table.sampling(row, row), row, row).adjustments[0].mask
    assert mask is not None
    assert np.flatnonzero(masks.forbidden(mask, 50)).tolist() == forbidden
