"""What captured graphs have room for, and what they take."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from antiphon.services.engine.backends.triton.decode_graphs import Capture, DecodeGraphs, captured_by_all
from antiphon.services.engine.backends.triton.device_inputs import DeviceStep, GraphSize
from antiphon.services.engine.backends.triton.kernels.runtime import Multiprocessor
from antiphon.services.engine.backends.triton.staging import Staging
from antiphon.services.engine.core.plan import EngineFacts, StepPlan, StepResult
from antiphon.services.engine.kernels.splits import LONG_SPLIT, SHORT_SPLITS, SPLIT_TOKENS, split_tokens, splits_of
from antiphon.services.engine.parallel.communicator import Communicator
from antiphon.services.engine.worker.capacity.graphs import Reach, graphs_bytes, partial_bytes
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


@pytest.mark.parametrize("size", [1, 8, 64, 256])
def test_sequences_of_the_usual_length_always_fit_a_graph_and_long_ones_while_few_are_in_a_step(size: int) -> None:
    graphs = recording([GraphSize(size, Reach(usual=8192, longest=131_072))])

    def fits(*lengths: int) -> bool:
        return graphs.find(np.array(lengths)) is not None

    assert fits(*[8192] * size)
    assert fits(131_072)
    # An H200 caches about 900,000 tokens of a model with 8 billion parameters.
    assert fits(*[900_000 // size if size > 6 else 131_072] * size)
    assert fits(*[131_072] * size) == (size <= 8)


def test_a_step_takes_the_smallest_graph_with_room_for_it() -> None:
    sizes = [GraphSize(size, Reach(usual=8192, longest=131_072)) for size in (1, 2, 4, 64)]
    graphs = recording(sizes)
    assert [graphs.find(np.full(count, 256)) for count in (1, 2, 3, 4, 65)] == [*sizes[:3], sizes[2], None]
    assert graphs.find(np.array([131_072] * 3)) == sizes[2]
    assert graphs.find(np.array([131_072] * 16)) == sizes[3]
    assert graphs.find(np.array([131_072] * 30)) is None


def recording(sizes: list[GraphSize]) -> DecodeGraphs:
    """Graphs of which nothing is computed."""

    def nothing(_: Callable[[], object], pool: object) -> tuple[Callable[[], None], object]:
        return (lambda: None), pool

    return DecodeGraphs(sizes, [SPLIT_TOKENS, 1024], lambda _: make_nothing(), lambda _: torch.zeros(256, 3), nothing)


def make_nothing() -> DeviceStep:
    none = torch.zeros(0)
    return DeviceStep(
        ids=none, sources=none, positions=none, slots=none, attention={}, logit_tokens=None, reported_ids=None
    )


def test_the_sums_of_splits_are_counted(tmp_path: Path) -> None:
    from tests.models import make_model

    description = describe_model(make_model(tmp_path))
    usual, far = Reach(256, 256), Reach(256, 100_000)
    heads, width = description.num_heads, description.head_dim
    assert partial_bytes(description, 4, usual) == 4 * heads * (width + 2) * 4
    assert partial_bytes(description, 4, far) == 4 * (64 + 82) * heads * (width + 2) * 4
    more = graphs_bytes(description, 4, far) - graphs_bytes(description, 4, usual)
    assert more == partial_bytes(description, 4, far) - partial_bytes(description, 4, usual)


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
    def nothing(_: Callable[[], object], pool: object) -> tuple[Callable[[], None], object]:
        return (lambda: None), pool

    def failing(_: Callable[[], object], pool: object) -> tuple[Callable[[], None], object]:
        raise torch.OutOfMemoryError("none is left")

    def told(captures: list[Capture]) -> list[RuntimeError | None]:
        found = dict[int, RuntimeError | None]()

        def make(ranks: Communicator) -> Idle:
            found[ranks.shard.rank] = None
            try:
                captured_by_all(ranks, captures[ranks.shard.rank])(lambda: None, None)
            except RuntimeError as error:
                found[ranks.shard.rank] = error
            return Idle()

        RankThreads(make, 2, 1).close()
        return [found[0], found[1]]

    assert told([nothing, nothing]) == [None, None]
    first, second = told([nothing, failing])
    assert str(first) == str(second) == "a graph of the decode steps was not captured on every rank"
    assert first is not None
    assert first.__cause__ is None
    assert second is not None
    assert isinstance(second.__cause__, torch.OutOfMemoryError)
