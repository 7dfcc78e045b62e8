"""Every instruction set against the torch backend, at sizes that fit nothing."""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from antiphon.services.engine.core.plan import CoreLimits
from tests.model.harness import Engine, make_prompt
from tests.native.libraries import BEST, VARIANTS
from tests.native.shapes import SHAPES

pytestmark = pytest.mark.model

PROMPTS = [make_prompt(length) for length in (1, 17, 33, 90)]
LIMITS = CoreLimits(max_num_seqs=4, max_num_batched_tokens=24, enable_prefix_caching=False)
BLOCK_SIZES = (1, 16, 64, 128)
# The best one with every size of block, each other one with one.
RUNS = [(BEST, size) for size in BLOCK_SIZES] + list(zip(list(VARIANTS)[1:], BLOCK_SIZES * 2, strict=False))


@functools.cache
def by_torch(directory: Path, dtype: str, num_tokens: int) -> list[NDArray[np.float64]]:
    return Engine(directory, LIMITS, dtype=dtype).log_probabilities(PROMPTS, num_tokens)


@pytest.mark.parametrize(("variant", "block_size"), RUNS)
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_gives_what_torch_gives(
    shape: str, variant: str, block_size: int, odd_models: Callable[[str], Path]
) -> None:
    """The sums have another order, that is all: differences of a few last bits."""
    directory = odd_models(shape)
    expected = by_torch(directory, "float32", 6)
    engine = Engine(directory, LIMITS, variant, dtype="float32", block_size=block_size)
    for ours, theirs in zip(engine.log_probabilities(PROMPTS, 6), expected, strict=True):
        assert (ours.argmax(-1) == theirs.argmax(-1)).all()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


ERROR_MAX = {"a delta rule": 0.25, "decays of each channel": 0.1}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_nearer_to_float32_than_torchs(shape: str, variant: str, odd_models: Callable[[str], Path]) -> None:
    """The residual stream keeps all its digits: about 0.7 times torch's error. The weights are the same.

    A recurrent state carries what was rounded on to later tokens.
    """
    directory = odd_models(shape)
    exact, torchs = by_torch(directory, "float32", 1), by_torch(directory, "bfloat16", 1)
    ours = Engine(directory, LIMITS, variant, dtype="bfloat16").log_probabilities(PROMPTS, 1)
    errors, torch_errors = (np.abs(np.stack(each) - np.stack(exact)) for each in (ours, torchs))
    assert errors.max() < ERROR_MAX.get(shape, 0.06)
    assert errors.mean() < 0.9 * torch_errors.mean()
