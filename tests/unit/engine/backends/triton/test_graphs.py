"""What captured graphs have room for, and what they take."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.services.engine.backends.triton.device_inputs import DeviceStep, HostStep, empty_step
from antiphon.services.engine.backends.triton.graph_sizes import GraphSize, mixed_sizes
from antiphon.services.engine.backends.triton.graphs import Capture, Graphs, captured_by_all
from antiphon.services.engine.backends.triton.kernels.attention.attention_work import Heads, Sequences, plan_work
from antiphon.services.engine.backends.triton.kernels.runtime import Multiprocessor
from antiphon.services.engine.backends.triton.staging import Staging
from antiphon.services.engine.core.plan import EngineFacts, StepPlan, StepResult
from antiphon.services.engine.kernels.splits import LONG_SPLIT, SHORT_SPLITS, SPLIT_TOKENS, split_tokens, splits_of
from antiphon.services.engine.models.description import LatentAttention
from antiphon.services.engine.parallel.communicator import Communicator
from antiphon.services.engine.worker.capacity.graphs import GraphBounds, Reach, graphs_bytes, partial_bytes
from antiphon.services.engine.worker.loading.model_files import describe_model
from tests.support.ranks import RankThreads

SHORT = SHORT_SPLITS * SPLIT_TOKENS


class Idle:
    """A worker that computes nothing."""

    def facts(self) -> EngineFacts:
        raise NotImplementedError

    def run(self, plan: StepPlan) -> StepResult:
        raise NotImplementedError

    def close(self) -> None:
        pass


def test_splits_are_short_at_first_and_long_behind() -> None:
    lengths = [0, 1, SPLIT_TOKENS, SPLIT_TOKENS + 1, SHORT, SHORT + 1, SHORT + LONG_SPLIT * SPLIT_TOKENS, 131_072]
    assert splits_of(np.array(lengths), SPLIT_TOKENS).tolist() == [0, 1, 1, 2, 64, 65, 65, 64 + 112]
    assert [split_tokens(group, latent=latent) for group, latent in ((8, False), (128, False), (128, True))] == [
        SPLIT_TOKENS,
        SPLIT_TOKENS,
        4 * SPLIT_TOKENS,
    ]


LATENT = LatentAttention(rank=512, rope_dim=64, nope_dim=128, value_dim=128)
HEADS = [Heads(group=4, head_dim=128, itemsize=2, stored_itemsize=2)]
WIDE = [*HEADS, Heads(group=128, head_dim=576, itemsize=2, stored_itemsize=2, latent=LATENT)]
REACH = Reach(usual=8192, longest=131_072)


def decode(sizes: list[int], reach: Reach = REACH) -> Graphs:
    """Graphs of which nothing is computed."""
    return recording([GraphSize(num_tokens=size, num_seqs=size, reach=reach) for size in sizes])


def recording(sizes: list[GraphSize]) -> Graphs:
    return Graphs(sizes, lambda _: make_nothing(), lambda _: torch.zeros(256, 3), lambda _: lambda: None)


def make_nothing() -> DeviceStep:
    none = torch.zeros(0)
    return DeviceStep(
        ids=none, sources=none, positions=none, slots=none, attention={}, logit_tokens=None, reported_ids=None
    )


def step_of(*shares: tuple[int, int]) -> HostStep:
    """A step of sequences with so many tokens, the last ones of which are computed."""
    seq_lens, query_lens = (np.array(column, dtype=np.int64) for column in zip(*shares, strict=True))
    starts, ids = query_lens.cumsum() - query_lens, np.zeros(query_lens.sum(), dtype=np.int64)
    sequences = Sequences(np.arange(len(shares)), seq_lens, starts, query_lens)
    return replace(empty_step(has_states=False, num_groups=1), ids=ids, sequences=sequences)


def found(graphs: Graphs, *shares: tuple[int, int]) -> int | None:
    """The tokens of the graph that takes a step."""
    size = graphs.find(step_of(*shares), WIDE)
    return None if size is None else size.num_tokens


@pytest.mark.parametrize("size", [1, 8, 64, 256])
def test_sequences_of_the_usual_length_always_fit_a_graph_and_long_ones_while_few_are_in_a_step(size: int) -> None:
    def fits(*lengths: int) -> bool:
        return found(decode([size]), *((length, 1) for length in lengths)) is not None

    assert fits(*[8192] * size)
    assert fits(131_072)
    # An H200 caches about 900,000 tokens of a model with 8 billion parameters.
    assert fits(*[900_000 // size if size > 6 else 131_072] * size)
    assert fits(*[131_072] * size) == (size <= 8)


def test_a_step_takes_the_smallest_graph_with_room_for_it() -> None:
    graphs = decode([1, 2, 4, 64])
    assert [found(graphs, *[(256, 1)] * count) for count in (1, 2, 3, 4, 65)] == [1, 2, 4, 4, None]
    assert found(graphs, *[(131_072, 1)] * 3) == 4
    assert found(graphs, *[(131_072, 1)] * 16) == 64
    assert found(graphs, *[(131_072, 1)] * 30) is None


def test_steps_with_prompts_and_draft_tokens_take_graphs_for_their_tokens() -> None:
    bounds = GraphBounds(num_seqs=64, num_tokens=256, max_queries=1, reach=REACH)
    plain, drafting = (recording(mixed_sizes(replace(bounds, max_queries=most), 0)) for most in (1, 5))
    assert found(plain, (128, 128), *[(500, 1)] * 63) == 192
    assert found(plain, *[(9, 9)] * 17) is None, "each prompt takes room for a tile of queries"
    assert found(plain, (500, 257)) is None
    assert found(drafting, *[(500, 5)] * 40) == found(drafting, *[(500, 4)] * 50) == 256
    assert found(drafting, (500, 200), *[(500, 2)] * 28) == 256
    # Rows of this many query heads of a key head are the prefill kernel's, if a sequence has several queries.
    size = mixed_sizes(replace(bounds, max_queries=5), 0)[-1]
    wide = replace(HEADS[0], group=16)
    assert (size.room(HEADS[0]).many, size.room(wide).many, size.room(wide).few) == (16, 64, 64)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_work_lists_of_a_step_that_fits_have_the_room_of_its_graph(data: st.DataObject) -> None:
    one_form, latent = data.draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    group, most = data.draw(st.sampled_from([1, 4, 16, 128])), data.draw(st.integers(1, 9))
    heads = Heads(
        group=group, head_dim=64, itemsize=2, stored_itemsize=2, latent=LATENT if latent else None, one_form=one_form
    )
    bounds = GraphBounds(num_seqs=8, num_tokens=64, max_queries=most, reach=Reach(512, 2000))
    size = data.draw(st.sampled_from(mixed_sizes(bounds, 0)))
    share = st.tuples(st.integers(0, 900), st.integers(1, 20)).map(lambda pair: (sum(pair), pair[1]))
    step = step_of(*data.draw(st.lists(share, min_size=1, max_size=8)))
    if len(step.ids) > size.num_tokens or not size.fits(step.sequences, [heads]):
        return
    room, places = size.room(heads), list[int]()

    def put(values: Any, capacity: int = 0) -> torch.Tensor:
        places.append(max(capacity, len(values)))
        return torch.from_numpy(np.resize(values, places[-1]))

    work = plan_work(step.sequences, torch.zeros((8, 4)), None, heads, put, room)
    real, places = places, list[int]()
    plan_work(empty_step(has_states=False, num_groups=1).sequences, torch.zeros((8, 4)), None, heads, put, room)
    assert real == places, "a graph reads all lists where those of the empty step were"
    in_many = 0
    if work.many is not None:
        assert work.many.num_tiles == len(work.many.tiles)
        in_many = int((work.many.query_lens[work.many.tiles >> 16] > 0).sum())
        queries = work.many.query_lens[: room.many]
        assert in_many == int((-(-queries // work.many.queries_a_tile)).sum())
    few = step.sequences.query_lens.sum() - (0 if work.many is None else int(work.many.query_lens.sum()))
    assert few == (0 if work.few is None else int(work.few.query_lens.sum()))


def test_the_sums_of_splits_are_counted(tmp_path: Path) -> None:
    from tests.models import make_model

    description = describe_model(make_model(tmp_path))
    usual = GraphBounds(num_seqs=4, num_tokens=64, max_queries=1, reach=Reach(256, 256))
    far = replace(usual, reach=Reach(256, 100_000))
    heads, width = description.num_heads, description.head_dim
    assert partial_bytes(description, usual) == 4 * heads * (width + 2) * 4
    assert partial_bytes(description, far) == 4 * (64 + 82) * heads * (width + 2) * 4
    assert partial_bytes(description, replace(far, max_queries=3)) == 4 * partial_bytes(description, far)
    more = graphs_bytes(description, far, 2) - graphs_bytes(description, usual, 2)
    assert more == partial_bytes(description, far) - partial_bytes(description, usual)


def test_steps_of_all_lengths_leave_no_memory_behind() -> None:
    staging = Staging(torch.device("cpu"), 2**20)
    known = staging.put(np.arange(3))
    for length in range(5000):
        staging.begin()
        staging.put(np.arange(length % 3000))
        staging.put(np.arange(length % 2999))
    assert len(staging._places) <= 1024
    staging.begin()
    again = staging.put(np.arange(3))
    assert again.data_ptr() == known.data_ptr()


@pytest.mark.parametrize(
    ("cost", "programs"),
    [
        ((96, 37_896, 128), 5),
        ((128, 12_808, 128), 4),
        ((168, 38_916, 128), 3),
        ((255, 200_000, 256), 1),
        ((16, 0, 32), 32),
    ],
)
def test_the_registers_and_the_memory_of_a_program_tell_how_many_run_at_once(
    cost: tuple[int, int, int], programs: int
) -> None:
    hopper = Multiprocessor(registers=65_536, shared=228 * 1024, threads=2048)
    assert hopper.programs(*cost) == programs


def test_ranks_capture_all_or_nothing() -> None:
    def nothing(_: Callable[[], object]) -> Callable[[], None]:
        return lambda: None

    def failing(_: Callable[[], object]) -> Callable[[], None]:
        raise torch.OutOfMemoryError("none is left")

    def told(captures: list[Capture]) -> list[RuntimeError | None]:
        found = dict[int, RuntimeError | None]()

        def make(ranks: Communicator) -> Idle:
            found[ranks.shard.rank] = None
            try:
                captured_by_all(ranks, captures[ranks.shard.rank])(lambda: None)
            except RuntimeError as error:
                found[ranks.shard.rank] = error
            return Idle()

        RankThreads(make, 2, 1).close()
        return [found[0], found[1]]

    assert told([nothing, nothing]) == [None, None]
    first, second = told([nothing, failing])
    assert str(first) == str(second) == "a graph of the steps was not captured on every rank"
    assert first is not None
    assert first.__cause__ is None
    assert second is not None
    assert isinstance(second.__cause__, torch.OutOfMemoryError)
