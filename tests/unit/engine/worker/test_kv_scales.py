import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from antiphon.services.engine.backends.cpu.packed import open_cache
from antiphon.services.engine.models.description import DecoderDescription, LatentAttention
from antiphon.services.engine.models.layout import llama_layout
from antiphon.services.engine.models.registry import find_family
from antiphon.services.engine.quantization.choice import PLAIN_WEIGHTS, WeightForm
from antiphon.services.engine.quantization.rounding import quantize_int8
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.services.engine.worker.loading.kv_scales import with_kv_scales
from antiphon.services.engine.worker.loading.parameters import ParameterReader
from antiphon.shared.config import EngineSettings

ATTENTION = "model.layers.{}.self_attn."
SCALED = WeightForm(kv_scales=True)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": True,
    "rms_norm_eps": 1e-6,
}
HEAD = 8


def described(**changes: object) -> DecoderDescription:
    return replace(find_family(CONFIG).describe(CONFIG), **changes)


def written(directory: Path, description: DecoderDescription, scales: dict[str, Tensor]) -> Path:
    """A checkpoint of ones."""
    sources = [source for parameter in llama_layout(description) for source in parameter.sources]
    save_file({**{each.name: torch.ones(each.shape) for each in sources}, **scales}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def reader(directory: Path, description: DecoderDescription, form: WeightForm = SCALED) -> ParameterReader:
    layout = llama_layout(description)
    return ParameterReader(directory, description, layout, torch.float32, torch.device("cpu"), form)


def factors(parameters: ParameterReader, layer: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """Of each head's rows: those of queries, of keys, of values; and of each head's columns."""
    qkv, o, bias = (parameters.matrix(f"layers.{layer}.{name}") for name in ("qkv", "o", "qkv"))
    assert isinstance(qkv, Tensor)
    assert isinstance(o, Tensor)
    assert torch.equal(qkv, qkv[:, :1].expand_as(qkv))
    assert torch.equal(o, o[:1].expand_as(o))
    bias = parameters.bias(f"layers.{layer}.qkv")
    assert bias is not None
    assert torch.equal(bias, qkv[:, 0])
    assert torch.equal(parameters.floats(f"layers.{layer}.qkv.bias"), bias)
    rows, columns = qkv[:, 0].unflatten(0, (-1, HEAD)), o[0].unflatten(0, (-1, HEAD))
    assert torch.equal(rows, rows[:, :1].expand_as(rows))
    assert torch.equal(columns, columns[:, :1].expand_as(columns))
    heads = rows[:, 0].tolist()
    return heads[:4], heads[4:6], heads[6:], columns[:, 0].tolist()


NONE = ([1.0] * 4, [1.0] * 2, [1.0] * 2, [1.0] * 4)
KEYS = ([4.0] * 4, [0.25] * 2, [1.0] * 2, [1.0] * 4)
VALUES = ([1.0] * 4, [1.0] * 2, [0.25] * 2, [4.0] * 4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k_scale", KEYS),
        ("v_scale", VALUES),
        ("attn.k_scale", KEYS),
        ("attn.v_scale", VALUES),
        ("k_proj.k_scale", KEYS),
        ("v_proj.v_scale", VALUES),
        ("qkv_proj.k_scale", KEYS),
        ("qkv_proj.v_scale", VALUES),
        ("kv_scale", (KEYS[0], KEYS[1], VALUES[2], VALUES[3])),
    ],
)
@pytest.mark.parametrize("value", [torch.tensor(2.1), torch.tensor([4.0], dtype=torch.bfloat16)])
def test_scales_are_found_by_all_their_names_and_rounded_up(
    value: Tensor, name: str, expected: tuple[list[float], ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    d = described()
    with reader(written(tmp_path, d, {ATTENTION.format(1) + name: value}), d) as parameters:
        assert factors(parameters, 1) == expected
        assert factors(parameters, 0) == NONE
    assert not caplog.text


@pytest.mark.parametrize("scale", [-1.0, 0.0, float("nan"), float("inf"), 1.0, 0.51])
def test_what_is_no_scale_or_has_no_effect_leaves_the_weights_as_they_are(scale: float, tmp_path: Path) -> None:
    d = described()
    with reader(written(tmp_path, d, {f"{ATTENTION.format(0)}k_scale": torch.tensor(scale)}), d) as parameters:
        assert factors(parameters, 0) == NONE


def test_each_key_head_has_a_scale_of_its_own_and_of_its_queries(tmp_path: Path) -> None:
    prefix, d = ATTENTION.format(0), described()
    scales = {f"{prefix}k_scale": torch.tensor([0.03, 500.0]), f"{prefix}v_scale": torch.tensor([[[8.0]], [[0.25]]])}
    directory = written(tmp_path, d, scales)
    with reader(directory, d) as parameters:
        queries, keys, values, outputs = factors(parameters, 0)
    assert (queries, keys) == ([2**-5, 2**-5, 512, 512], [2**5, 1 / 512])
    assert (values, outputs) == ([1 / 8, 4], [8, 8, 0.25, 0.25])
    # A quantized matrix has one factor for its columns.
    with reader(directory, d, replace(SCALED, quantize=lambda _, weight: quantize_int8(weight))) as parameters:
        qkv, o = parameters.matrix("layers.0.qkv"), parameters.matrix("layers.0.o")
    assert isinstance(qkv, QuantizedWeight)
    assert isinstance(o, QuantizedWeight)
    one = quantize_int8(torch.ones(1, 32)).scales
    torch.testing.assert_close(
        (qkv.scales / one).unflatten(0, (-1, HEAD))[:, 0].tolist(), [*queries, *keys, 1 / 8, 1 / 8]
    )
    torch.testing.assert_close((o.scales / one).tolist(), [8.0] * 32)


def test_layers_that_read_the_keys_of_others_have_their_factors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    d = described(kv_sources=(0, 0))
    scales = {f"{ATTENTION.format(layer)}kv_scale": torch.tensor(4.0**-layer) for layer in (0, 1)}
    scales[f"{ATTENTION.format(0)}kv_scale"] = torch.tensor(4.0)
    with reader(written(tmp_path, d, scales), d) as parameters:
        assert factors(parameters, 0) == (KEYS[0], KEYS[1], VALUES[2], VALUES[3])
        assert factors(parameters, 1) == (KEYS[0], [], [], VALUES[3])
    assert "without an effect: keys and values of layers 1 (those of another layer are read)" in caplog.text


def test_one_warning_names_the_scales_without_an_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    d = described(value_norm=True)
    scales = {f"{ATTENTION.format(layer)}v_scale": torch.tensor(2.0) for layer in (0, 1)}
    scales |= {f"{ATTENTION.format(0)}k_scale": torch.ones(3), "model.layers.9.self_attn.k_scale": torch.tensor(1.0)}
    with reader(written(tmp_path, d, scales), d) as parameters:
        assert factors(parameters, 0) == factors(parameters, 1) == NONE
    assert [record.message for record in caplog.records] == [
        "--kv-cache-dtype: scales of the checkpoint without an effect: keys of layers 0 (3 scales for 2 heads); "
        "values of layers 0, 1 (they are normalised); model.layers.9.self_attn.k_scale (no layer has this name)"
    ]


def test_latent_attention_has_no_scales(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    latent = LatentAttention(rank=8, rope_dim=4, nope_dim=4, value_dim=8)
    d = described(latent=latent, num_kv_heads=1, head_dim=12, qkv_bias=False)
    scales = {f"{ATTENTION.format(0)}{which}_scale": torch.tensor(2.0) for which in "kv"}
    with reader(written(tmp_path, d, scales), d) as parameters:
        assert torch.equal(parameters.tensor("layers.0.qkv.weight"), torch.ones(44, 32))
    assert "keys of layers 0 (latent attention); values of layers 0 (latent attention)" in caplog.text


def test_weights_are_left_alone_without_the_form(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    d = described()
    with reader(written(tmp_path, d, {f"{ATTENTION.format(0)}kv_scale": torch.tensor(4.0)}), d, WeightForm()) as found:
        assert factors(found, 0) == NONE
        assert found.is_mapped("layers.0.o.weight")
    assert not caplog.text


@pytest.mark.parametrize("kind", ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"])
def test_the_form_has_a_name_of_its_own_if_there_are_scales_and_the_cache_has_8_bits(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By this name packed weights, and KV from other engines, are kept apart."""
    d, chosen = described(), EngineSettings(kv_cache_dtype=kind)
    directory = written(tmp_path, d, {})
    assert with_kv_scales(PLAIN_WEIGHTS, chosen, directory, CONFIG) == PLAIN_WEIGHTS
    written(tmp_path, d, {f"{ATTENTION.format(0)}k_scale": torch.tensor(4.0)})
    form = with_kv_scales(PLAIN_WEIGHTS, chosen, directory, CONFIG)
    assert (form.kv_scales, form.name != PLAIN_WEIGHTS.name) == ((False, False) if kind == "auto" else (True, True))
    caches = [open_cache(str(tmp_path), directory, torch.float32, each) for each in (form, PLAIN_WEIGHTS)]
    paths = {cache._path for cache in caches if cache is not None}
    assert len(paths) == (1 if kind == "auto" else 2)
    assert not caplog.text
    assert with_kv_scales(PLAIN_WEIGHTS, chosen, directory, {"architectures": ["Other"]}) == PLAIN_WEIGHTS
    assert ("this architecture runs through transformers" in caplog.text) == (kind != "auto")
