"""Models whose layers have different heads: their blocks travel; what they are not served with."""

import itertools

import pytest
import torch

from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.worker.capacity.kv_cache import bytes_per_block
from antiphon.services.engine.worker.loading.model_files import describe_model
from antiphon.shared.flags import SettingsError
from tests.model.harness import Models, settings
from tests.unit.engine.kv.engines import PROMPT, run, started

pytestmark = pytest.mark.model


def test_adapters_are_refused(models: Models) -> None:
    with pytest.raises(SettingsError, match="--enable-lora: the layers of this model have different heads"):
        load_worker(settings(models("laguna"), enable_lora=True, max_loras=1))


@pytest.mark.parametrize(
    ("variant", "reason"),
    [("laguna", "layers with the same number of heads only"), ("gemma3n", "one residual stream only")],
)
def test_triton_is_refused(variant: str, reason: str, models: Models) -> None:
    with pytest.raises(SettingsError, match=f"--cpu-backend=triton: they compute {reason}"):
        load_worker(settings(models(variant), cpu_backend="triton"))


@pytest.mark.parametrize(("sender", "receiver"), list(itertools.product(("cpp", "torch"), repeat=2)))
@pytest.mark.parametrize("variant", ["gemma3n", "gemma4", "gemma4 with layers that share keys"])
def test_blocks_go_from_one_backend_to_another(variant: str, sender: str, receiver: str, models: Models) -> None:
    """Narrow layers share a tensor of the cache, in which each backend has an order of its own."""
    directory = models(variant)
    with started(directory, cpu_backend=receiver) as alone:
        alone.add("right", None)
        right = run(alone, until=(alone, "right"))
    with (
        started(directory, "prefill", cpu_backend=sender) as prefill,
        started(directory, "decode", cpu_backend=receiver, enable_prefix_caching=False) as decode,
    ):
        decode.add("moved", prefill.compute_prompt("t"))
        assert run(prefill, decode, until=(decode, "moved")) == right
        assert decode.engine.counters().kv_loaded_tokens > len(PROMPT) // 2


def test_a_narrow_layer_takes_no_more_memory_than_it_needs(models: Models) -> None:
    """Two layers with heads of 16 numbers share a tensor as wide as that of a layer with heads of 32."""
    description = describe_model(models("gemma4 with layers that share keys"))
    assert description.slabs == ((0, 1), (2,), (3,))
    assert description.kv_sources == (0, 1, 2, 3, 2, 2, 2, 3)
    assert bytes_per_block(description, 16, torch.float32) == 3 * 2 * 16 * 32 * 4


def test_ranks_exchange_no_blocks_of_them(models: Models) -> None:
    with (
        pytest.raises(SettingsError, match="--role: the layers of this model differ in their heads"),
        started(models("gemma4"), "prefill", tensor_parallel_size=2),
    ):
        pass
