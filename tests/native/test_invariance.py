"""A sequence's log probabilities are the same to the last bit whatever shares its steps and whoever computes them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.worker.interface import ModelWorker
from tests.model.harness import Engine, make_prompt, make_worker
from tests.native.libraries import BEST, VARIANTS
from tests.support.slow import slow_but

pytestmark = pytest.mark.model

NUM_TOKENS = 4
MIXED = (
    "36 heads in a group",
    "heads of 136 dimensions",
    "caps, windows and four norms",
    "experts beside a shared one",
    "biases for positions",
    "state spaces and narrow experts",
    "state spaces beside attention",
    "decays of each channel",
    "decays of each dimension of keys",
    "no attention",
    "latents",
    "short convolutions",
    "a delta rule",
    "chunks and weighted inputs of experts",
    "streams and cut gates",
)
OWN_KEYS = "a key head for each query head"


class Workers:
    """One for each kind: what earlier examples left in its cache must not matter either."""

    def __init__(self, variant: str, dtype: str) -> None:
        self._variant, self._dtype = variant, dtype
        self._workers: dict[tuple[Path, int, int, str], ModelWorker] = {}
        self._alone: dict[tuple[Path, int, str], NDArray[np.float64]] = {}

    def engine(self, directory: Path, block_size: int, threads: int, limits: CoreLimits, cache: str = "auto") -> Engine:
        key = (directory, block_size, threads, cache)
        if key not in self._workers:
            self._workers[key] = make_worker(
                self._variant,
                directory,
                dtype=self._dtype,
                kv_cache_dtype=cache,
                block_size=block_size,
                threads=threads,
                max_num_seqs=6,
                num_gpu_blocks_override=1000 // block_size,
            )
        return Engine.around(self._workers[key], limits)

    def alone(self, directory: Path, prompt: list[int], cache: str = "auto") -> NDArray[np.float64]:
        """The whole prompt in one step on one thread."""
        key = (directory, len(prompt), cache)
        if key not in self._alone:
            engine = self.engine(
                directory,
                16,
                1,
                CoreLimits(max_num_seqs=1, max_num_batched_tokens=1024, enable_prefix_caching=False),
                cache,
            )
            self._alone[key] = engine.log_probabilities([prompt], NUM_TOKENS)[0]
        return self._alone[key]

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()


@pytest.fixture
def workers(variant: str, dtype: str) -> Iterator[Workers]:
    made = Workers(variant, dtype)
    yield made
    made.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("variant", slow_but([BEST], VARIANTS))
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.sampled_from([*MIXED, OWN_KEYS]),
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=6),
    budget=st.integers(6, 90),
    block_size=st.sampled_from([1, 8, 16, 64, 128]),
    threads=st.sampled_from([1, 2, 3]),
    caching=st.booleans(),
    cache=st.sampled_from(["auto", "fp8_e4m3", "fp8_e5m2"]),
)
@example(
    shape="caps, windows and four norms",
    lengths=[100, 61, 85],
    budget=24,
    block_size=16,
    threads=2,
    caching=False,
    cache="auto",
)
@example(
    shape=OWN_KEYS,
    lengths=[100, 61, 85, 99, 31, 70],
    budget=90,
    block_size=64,
    threads=1,
    caching=False,
    cache="auto",
)
@example(
    shape="36 heads in a group",
    lengths=[100, 61, 85, 1, 17],
    budget=40,
    block_size=128,
    threads=2,
    caching=True,
    cache="fp8_e4m3",
)
def test_a_sequence_computes_the_same_in_any_company(
    shape: str,
    lengths: list[int],
    budget: int,
    block_size: int,
    threads: int,
    caching: bool,
    cache: str,
    workers: Workers,
    odd_models: Callable[[str], Path],
) -> None:
    directory = odd_models(shape)
    prompts = [make_prompt(length) for length in lengths]
    engine = workers.engine(
        directory,
        block_size,
        threads,
        CoreLimits(max_num_seqs=6, max_num_batched_tokens=budget, enable_prefix_caching=caching),
        cache,
    )
    together = engine.log_probabilities(prompts, NUM_TOKENS)
    for prompt, ours in zip(prompts, together, strict=True):
        assert np.array_equal(ours, workers.alone(directory, prompt, cache))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("variant", slow_but([BEST], VARIANTS))
def test_more_rows_than_a_core_can_keep_compute_the_same(workers: Workers, odd_models: Callable[[str], Path]) -> None:
    """700 rows with 1100 terms go through the matrices in parts: the sums of a part are kept for the next."""
    directory, prompt = odd_models("a wide MLP"), make_prompt(700)
    whole = workers.alone(directory, prompt)
    chunked = workers.engine(
        directory, 64, 2, CoreLimits(max_num_seqs=1, max_num_batched_tokens=90, enable_prefix_caching=False)
    )
    assert np.array_equal(chunked.log_probabilities([prompt], NUM_TOKENS)[0], whole)
    again = workers.engine(
        directory, 128, 3, CoreLimits(max_num_seqs=1, max_num_batched_tokens=600, enable_prefix_caching=False)
    )
    assert np.array_equal(again.log_probabilities([prompt], NUM_TOKENS)[0], whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("variant", slow_but([BEST], VARIANTS))
@pytest.mark.parametrize("block_size", [8, 16, 128])
def test_rows_that_a_thread_takes_by_itself_compute_the_same(
    block_size: int, workers: Workers, odd_models: Callable[[str], Path]
) -> None:
    """Steps of many rows, a share of them through whole layers on each thread; in chunks all share out each matrix.

    615 rows on two threads are nearly the most that one takes at a time.
    """
    directory, prompts = odd_models("heads of whole panels"), [make_prompt(length) for length in (250, 1, 33, 171, 160)]
    whole = workers.engine(
        directory, block_size, 2, CoreLimits(max_num_seqs=6, max_num_batched_tokens=1024, enable_prefix_caching=False)
    )
    many = workers.engine(
        directory, block_size, 3, CoreLimits(max_num_seqs=6, max_num_batched_tokens=431, enable_prefix_caching=False)
    )
    chunked = workers.engine(
        directory, 64, 1, CoreLimits(max_num_seqs=1, max_num_batched_tokens=60, enable_prefix_caching=False)
    )
    answers = [engine.log_probabilities(prompts, NUM_TOKENS) for engine in (whole, many, chunked)]
    for rows in zip(*answers, strict=True):
        assert np.array_equal(rows[0], rows[1])
        assert np.array_equal(rows[0], rows[2])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("variant", slow_but([BEST], VARIANTS))
@pytest.mark.parametrize(
    ("shape", "cache"),
    [*((shape, "auto") for shape in (*MIXED, OWN_KEYS)), (OWN_KEYS, "fp8_e4m3"), (MIXED[0], "fp8_e5m2")],
)
def test_a_token_that_decodes_alone_computes_what_a_prompt_does(
    shape: str, cache: str, dtype: str, workers: Workers, odd_models: Callable[[str], Path]
) -> None:
    """So a sequence can go on elsewhere: there, what it has said so far is part of the prompt.

    Rounding to bfloat16 hides nearly every difference of a last bit: it takes some ten thousand numbers to see one.
    """
    step = 1 if dtype == "bfloat16" else 4
    engine = workers.engine(
        odd_models(shape),
        64,
        2,
        CoreLimits(max_num_seqs=1, max_num_batched_tokens=1024, enable_prefix_caching=False),
        cache,
    )
    for prompt in (make_prompt(31), make_prompt(97), make_prompt(99)):
        said = engine.log_probabilities([prompt], 24)[0]
        for count in range(1, 24, step):
            [again] = engine.log_probabilities([prompt + said[:count].argmax(-1).tolist()], 1)[0]
            assert np.array_equal(again, said[count])
