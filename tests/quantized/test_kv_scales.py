"""Scales of keys and values in a KV cache of 8 bits: models whose keys and values are out of range without them.

Widened models compute what the original ones do: keys and values are multiplied by powers of two, queries and outputs
divided by them. So with the scales an engine must give exactly the numbers of the original model.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from antiphon.services.engine.backends.torch.worker import TorchWorker
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.worker.loading.model_files import describe_model
from tests.model.harness import BACKENDS, VARIANTS, Engine, make_prompt, settings
from tests.models import make_model
from tests.quantized.checkpoints import make_checkpoints
from tests.support.ranks import RankThreads

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
WIDE = 2.0**12
PROMPTS = [make_prompt(length) for length in (5, 40)]
LIMITS = CoreLimits(max_num_seqs=4, max_num_batched_tokens=24, enable_prefix_caching=False)
NEAR = 0.6
"""Largest mean difference of log probabilities that a cache of 8 bits makes."""
ATTENTION = "model.layers.{}.self_attn."
Scales = Callable[[DecoderDescription, int], tuple[Tensor, Tensor]]
"""Of a layer, the factors of keys and of values, a number for each key head."""


def equal(d: DecoderDescription, layer: int) -> tuple[Tensor, Tensor]:
    count = d.of_layer(layer).num_kv_heads
    return torch.full((count,), WIDE * 2**layer), torch.full((count,), WIDE)


def each_head(d: DecoderDescription, layer: int) -> tuple[Tensor, Tensor]:
    powers = 2.0 ** torch.arange(d.of_layer(layer).num_kv_heads)
    return WIDE * powers, WIDE / powers


def only_keys(d: DecoderDescription, layer: int) -> tuple[Tensor, Tensor]:
    keys, values = equal(d, layer)
    return keys, torch.ones_like(values)


def widened(model: Path, target: Path, scales: Scales, *, named: bool = True) -> Path:
    """The model with wide keys and values, and (`named`) their scales, which are no powers of two.

    Tensors of quantized weights are multiplied at their scales. Norms of queries and keys have the factors of a first
    key head for all.
    """
    shutil.copytree(model, target)
    d, tensors = describe_model(model), load_file(model / "model.safetensors")
    for layer in range(d.num_layers):
        own, prefix = d.of_layer(layer), ATTENTION.format(layer)
        keys, values = scales(d, d.kv_sources[layer] if d.kv_sources else layer)
        group, plus = own.num_heads // own.num_kv_heads, float(d.norm == "rms_plus_one")
        if d.qk_norm:
            for name, factors in (("q_norm", 1 / keys.repeat_interleave(group)), ("k_norm", keys)):
                if (weight := tensors.get(f"{prefix}{name}.weight")) is not None:
                    by = factors.repeat_interleave(own.head_dim) if d.whole_qk_norm else factors[0]
                    tensors[f"{prefix}{name}.weight"] = (weight + plus) * by - plus
        else:
            times(tensors, f"{prefix}q_proj", (1 / keys).repeat_interleave(group * own.head_dim))
            times(tensors, f"{prefix}k_proj", keys.repeat_interleave(own.head_dim))
        times(tensors, f"{prefix}v_proj", values.repeat_interleave(own.head_dim))
        times(tensors, f"{prefix}o_proj", (1 / values).repeat_interleave(group * own.head_dim), columns=True)
        if named and not d.borrows_kv(layer):
            # Rounded up, these are the factors.
            for name, factors in (("k_scale", keys), ("v_scale", values)):
                same = bool((factors == factors[0]).all())
                tensors[f"{prefix}{name}"] = factors[0] * 0.7 if same else factors[:, None, None] * 0.6
    save_file({name: each.contiguous() for name, each in tensors.items()}, target / "model.safetensors")
    return target


def times(tensors: dict[str, Tensor], module: str, factors: Tensor, *, columns: bool = False) -> None:
    scales = [name for name in (f"{module}.weight_scale", f"{module}.weight_scale_inv") if name in tensors]
    for name in scales or [f"{module}.weight"]:
        if name not in tensors:
            return
        factors = factors[:1] if scales else factors
        tensors[name] = tensors[name] * (factors if columns or scales else factors[:, None])
    bias = f"{module}.bias"
    if bias in tensors and not columns:
        tensors[bias] = tensors[bias] * factors


def log_probabilities(directory: Path, backend: str, **options: object) -> NDArray[np.float64]:
    return np.concatenate(Engine(directory, LIMITS, backend, **options).log_probabilities(PROMPTS, 3))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases, and widths that are multiples of every layout's groups."""
    return make_model(
        tmp_path_factory.mktemp("model"), "qwen2", seed=3, dtype="float32", hidden_size=64, intermediate_size=192
    )


@pytest.mark.spec("S-SRV-036")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scales", [equal, each_head])
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_keys_and_values_out_of_range_are_kept_with_their_scales_only(
    kind: str, scales: Scales, backend: str, model: Path, tmp_path: Path
) -> None:
    wide = widened(model, tmp_path / "wide", scales)
    without = widened(model, tmp_path / "without", scales, named=False)
    exact = log_probabilities(model, backend)
    found = log_probabilities(wide, backend, kv_cache_dtype=kind)
    np.testing.assert_array_equal(found, log_probabilities(model, backend, kv_cache_dtype=kind))
    near = np.abs(found - exact).mean()
    assert near < NEAR
    # The other kind has the range for these numbers without scales.
    if kind == "fp8_e4m3":
        assert np.abs(log_probabilities(without, backend, kv_cache_dtype=kind) - exact).mean() > 3 * near
    # A cache of the model's type needs no scales, and the weights are those of a checkpoint without them.
    np.testing.assert_array_equal(log_probabilities(wide, backend), log_probabilities(without, backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["fp8", "fp8, blocks", "fp8, compressed", "w8a16"])
def test_scales_of_quantized_checkpoints_are_used(layout: str, backend: str, model: Path, tmp_path: Path) -> None:
    quantized, _ = make_checkpoints(model, layout, tmp_path)
    wide = widened(quantized, tmp_path / "wide", equal)
    found = log_probabilities(wide, backend, kv_cache_dtype="fp8")
    np.testing.assert_array_equal(found, log_probabilities(quantized, backend, kv_cache_dtype="fp8"))
    assert np.abs(found - log_probabilities(quantized, backend)).mean() < NEAR


def test_weights_that_are_quantized_while_loading_have_the_scales_too(model: Path, tmp_path: Path) -> None:
    """Of scales for each head, the output projection gets the largest."""
    wide, options = widened(model, tmp_path / "wide", equal), {"quantization": "ifq", "kv_cache_dtype": "fp8"}
    found = log_probabilities(wide, "native", **options)
    np.testing.assert_array_equal(found, log_probabilities(model, "native", **options))
    wide = widened(model, tmp_path / "heads", each_head)
    exact = log_probabilities(wide, "native", quantization="ifq")
    assert np.abs(log_probabilities(wide, "native", **options) - exact).mean() < NEAR


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("variant", "scales"),
    [
        ("qwen3", equal),
        ("olmo2", each_head),
        ("gemma3", equal),
        ("gemma3n", only_keys),
        ("gemma4 with layers that share keys", only_keys),
    ],
)
def test_norms_of_queries_and_keys_get_the_scales(
    variant: str, scales: Scales, backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where later layers read the keys of earlier ones."""
    family, fields = VARIANTS[variant]
    model = make_model(tmp_path / "model", family, **fields)
    wide = widened(model, tmp_path / "wide", scales)
    expected = log_probabilities(model, backend, kv_cache_dtype="fp8")
    found = log_probabilities(wide, backend, kv_cache_dtype="fp8")
    if family == "gemma3_text":
        # A norm's weight of nearly -1, to which 1 is added, does not have the bits of the original one.
        assert np.abs(found - expected).mean() < NEAR / 10
    else:
        np.testing.assert_array_equal(found, expected)
    assert np.abs(found - log_probabilities(wide, backend)).mean() < NEAR
    warned = "values of layers 0" in caplog.text and "(they are normalised)" in caplog.text
    assert warned == describe_model(model).value_norm


def test_the_kernels_for_gpus_use_the_scales(model: Path, tmp_path: Path) -> None:
    """Under Triton's interpreter."""
    wide = widened(model, tmp_path / "wide", each_head)
    engines = [Engine(each, LIMITS, "triton", kv_cache_dtype="fp8") for each in (wide, model)]
    found, expected = (engine.log_probabilities(PROMPTS[:1], 2)[0] for engine in engines)
    np.testing.assert_array_equal(found, expected)


def test_ranks_have_the_factors_of_their_heads(model: Path, tmp_path: Path) -> None:
    def computed(directory: Path) -> NDArray[np.float64]:
        chosen = settings(directory, max_num_seqs=LIMITS.max_num_seqs, kv_cache_dtype="fp8")
        ranks = RankThreads(lambda rank: TorchWorker(chosen, directory, torch.device("cpu"), rank), 2, 1)
        return np.concatenate(Engine.around(ranks, LIMITS).log_probabilities(PROMPTS, 2))

    np.testing.assert_array_equal(computed(widened(model, tmp_path / "wide", each_head)), computed(model))


def test_kv_is_exchanged_only_among_engines_that_use_the_scales(model: Path, tmp_path: Path) -> None:
    wide = widened(model, tmp_path / "wide", equal)

    def content(directory: Path, backend: str, **options: object) -> str:
        return Engine(directory, LIMITS, backend, **options).worker.facts().content

    scaled = {content(wide, backend, kv_cache_dtype="fp8") for backend in BACKENDS}
    assert len(scaled) == 1
    assert content(wide, "torch") not in scaled
    assert content(model, "torch", kv_cache_dtype="fp8") == content(model, "torch")


def test_a_checkpoint_with_adapters_has_no_scales_and_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wide = widened(model, tmp_path / "wide", equal)
    Engine(wide, LIMITS, "torch", kv_cache_dtype="fp8", enable_lora=True, max_loras=1)
    assert caplog.text.count("no scales of the checkpoint have an effect: an adapter's products") == 1


def test_a_checkpoint_may_have_scales_of_the_cache_alone(model: Path, tmp_path: Path) -> None:
    wide = widened(model, tmp_path / "wide", equal)
    config = json.loads((wide / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme
    }  # fmt: skip
    (wide / "config.json").write_text(json.dumps(config))
    found = log_probabilities(wide, "native", kv_cache_dtype="fp8")
    np.testing.assert_array_equal(found, log_probabilities(model, "native", kv_cache_dtype="fp8"))
