"""What rounding to bfloat16 costs in every family, in shares of what it costs the reference.

The error of a model in bfloat16 is that of its log probabilities against float32 arithmetic on the same weights, in
nats. The reference that rounds is transformers' own model in bfloat16, or the plain one with its products in bfloat16.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from antiphon.services.engine.core.plan import CoreLimits
from tests.model.harness import BACKENDS, FAMILY_VARIANTS, VARIANTS, Engine, make_prompt, on_both, pairs_of
from tests.models import make_model, reference_log_probabilities
from tests.plain_decoders import PLAIN_FAMILIES

pytestmark = pytest.mark.model

PROMPTS = [make_prompt(90 - 80 * i // 24, seed=i) for i in range(24)]
ROUTED_VARIANTS = ("mixtral", "qwen2 with experts", "qwen3 with experts", "gpt_oss", "deepseek_v3")
ROUTED_VARIANTS += ("glm4 with experts", "dots1", "ernie4_5 with experts", "minimax_m2", "hunyuan with experts")
ROUTED_VARIANTS += ("lfm2 with experts", "qwen3_5 with experts", "qwen3_next")
ROUTED_VARIANTS += ("olmoe", "granite with experts beside a shared one", "granite with state spaces and experts")
ROUTED_VARIANTS += ("nemotron_h with experts", "nemotron_h with narrow experts")
ROUTED_VARIANTS += ("afmoe", "hy_v3", "laguna", "mellum")
ROUTED_VARIANTS += ("llama4", "llama4 with two experts a token", "jamba", "kimi_linear", "kimi_linear with wide heads")
SHARE_MAX = {"torch": 1.2, "native": 0.8}
SHARE_MAX_OF_PLAIN = {"torch": 1.2, "native": 1.0}
MEAN_SHARE_MAX = {"torch": 0.95, "native": 0.64}
REFERENCE_ERROR_MAX = 0.15

LogProbabilities = NDArray[np.float64]
Checkpoint = tuple[Path, LogProbabilities, float]
Shares = Callable[[str, str], float]


@pytest.fixture(scope="module")
def share_of(tmp_path_factory: pytest.TempPathFactory) -> Shares:
    """The error of a backend and a variant, as a share of the reference's; each found once."""

    @cache
    def checkpoint(variant: str) -> Checkpoint:
        family, overrides = VARIANTS[variant]
        directory = make_model(tmp_path_factory.mktemp("rounded"), family, dtype="bfloat16", **overrides)
        exact, coarse = (
            reference_log_probabilities(directory, PROMPTS, dtype).numpy() for dtype in ("float32", "bfloat16")
        )
        return directory, exact, error(coarse, exact, variant)

    @cache
    def share(backend: str, variant: str) -> float:
        directory, exact, reference_error = checkpoint(variant)
        assert reference_error < REFERENCE_ERROR_MAX
        engine = Engine(
            directory,
            CoreLimits(max_num_seqs=16, max_num_batched_tokens=64, enable_prefix_caching=False),
            backend,
            dtype="bfloat16",
        )
        found = np.stack([rows[0] for rows in engine.log_probabilities(PROMPTS, 1)])
        return error(found, exact, variant) / reference_error

    return share


def error(found: LogProbabilities, exact: LogProbabilities, variant: str) -> float:
    """Root mean square over the vocabulary; of the prompts the mean, or the median where tokens choose experts.

    Where two experts are nearly equal rounding picks the other one, here or in the reference: a few prompts then say
    nothing of rounding.
    """
    each = np.sqrt(np.square(found - exact).mean(axis=1))
    return float(np.median(each) if variant in ROUTED_VARIANTS else each.mean())


@pytest.mark.parametrize(("backend", "variant"), on_both(FAMILY_VARIANTS))
def test_bfloat16_log_probabilities_are_near_those_of_float32_weights(
    backend: str, variant: str, share_of: Shares
) -> None:
    """The torch backend rounds where the reference does: at most 1.2 of its error (found over seeds: 0.65 to 1.1).

    The C++ backend keeps its residual stream in float32: at most 0.8 (0.35 to 0.75), and 1.0 (0.6 to 0.95) of the
    plain reference's error, which keeps it too. No bound near zero is needed: that error is 0.003 to 0.11 nats, and
    over 0.15 the reference itself would be wrong. One more place that rounds adds about a tenth to a share: it shows in
    the mean over the families, a gross error here.
    """
    plain = VARIANTS[variant][0] in PLAIN_FAMILIES
    assert share_of(backend, variant) <= (SHARE_MAX_OF_PLAIN if plain else SHARE_MAX)[backend]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_over_all_families_rounding_costs_less_than_in_the_reference(backend: str, share_of: Shares) -> None:
    """The mean of the shares hardly depends on seeds: at most 0.95 and 0.64.

    Found over seeds and instruction sets: 0.86 to 0.90 and 0.61 to 0.62. A softmax in bfloat16 makes the first 0.97, a
    norm 1.09; a residual stream in bfloat16 makes the second 0.67, keys rounded before they turn 0.65.
    """
    shares = [share_of(backend, variant) for also, variant in pairs_of(FAMILY_VARIANTS) if also == backend]
    assert np.mean(shares) <= MEAN_SHARE_MAX[backend]
