"""Checkpoints of bitsandbytes: tensors that the package wrote, and whole models in all backends."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.quantization.formats import prepared
from antiphon.services.engine.quantization.formats.bitsandbytes import BitsAndBytes
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from tests.model.harness import NUM_TOKENS, Engine, make_prompt
from tests.models import greedy_reference, make_model
from tests.quantized.bitsandbytes_layout import four_bits, make_checkpoints

RECORDED = load_file(Path(__file__).parents[1] / "golden" / "bitsandbytes.safetensors")
"""Written by bitsandbytes 0.50.2: the tensors of `NAME.weight`, and what the package says that they stand for."""
METHOD = BitsAndBytes.of_config({})


def read(tensors: dict[str, Tensor], module: str, shape: tuple[int, int]) -> Tensor | QuantizedWeight:
    parts = METHOD.parts(module, tensors.__contains__)
    return METHOD.weight({part: tensors[name] for part, name in parts.items()}, shape)


@pytest.mark.parametrize(
    ("module", "kind"), [("nf4", "int4"), ("nested", "int4"), ("fp4", "int4"), ("int8", "int8"), ("uneven", None)]
)
def test_the_packages_own_tensors_are_read_as_it_reads_them(module: str, kind: str | None) -> None:
    expected = RECORDED[f"{module}.expected"]
    weight = read(RECORDED, module, (expected.shape[0], expected.shape[1]))
    assert (weight.kind if isinstance(weight, QuantizedWeight) else None) == kind
    wide = weight.dequantized() if isinstance(weight, QuantizedWeight) else weight
    torch.testing.assert_close(wide, expected, rtol=1e-6 if kind == "int8" else 0, atol=1e-8)
    used = set(METHOD.parts(module, RECORDED.__contains__).values())
    others = {name for name in RECORDED if name.startswith(f"{module}.")} - used - {f"{module}.expected"}
    assert all(METHOD.ignores(name) for name in others), others


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of `down_proj` have 176 numbers: their blocks of 64 do not end with a row."""
    return make_model(tmp_path_factory.mktemp("model"), "qwen2", seed=3, dtype="float32")


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize(("bits", "nested"), [(4, True), (4, False), (8, False)])
def test_a_checkpoint_gives_the_tokens_of_the_weights_that_it_stands_for(
    bits: int, nested: bool, backend: str, model: Path, tmp_path: Path
) -> None:
    quantized, plain = make_checkpoints(model, bits, tmp_path, nested)
    prompts = [make_prompt(length) for length in (5, 40)]
    engine = Engine(
        quantized,
        CoreLimits(max_num_seqs=8, max_num_batched_tokens=24, enable_prefix_caching=False),
        backend,
        dtype="float32",
    )
    assert engine.generate(prompts) == [greedy_reference(plain, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(7, 1, dtype=torch.uint8)}, "weight is torch.uint8 with 7 bytes"),
        ({"weight.absmax": torch.zeros(3, dtype=torch.uint8)}, "absmax has shape"),
        ({"weight.quant_map": torch.zeros(17)}, "quant_map has shape"),
        ({"weight.nested_absmax": torch.zeros(9)}, "nested_absmax has shape"),
        ({"weight.nested_absmax": None}, "nested_absmax or nested_quant_map is missing"),
        ({"weight.quant_state.bitsandbytes__nf4": torch.tensor([255, 1], dtype=torch.uint8)}, "is not JSON"),
        ({"weight.quant_state.bitsandbytes__nf4": torch.tensor([0x31], dtype=torch.uint8)}, "not a JSON object"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(change: dict[str, Tensor | None], message: str) -> None:
    stored, _ = four_bits(torch.randn(8, 128))
    tensors = {f"m.{name}": tensor for name, tensor in ({**stored, **change}).items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        read(tensors, "m", (8, 128))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"shape": [8, 64]}, r"has shape \[8, 64\] instead of"), ({"blocksize": 0}, "blocksize of quant_state is 0")],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    stored, _ = four_bits(torch.randn(8, 128))
    name = "weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(stored[name].tolist())) | change
    stored[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        read({f"m.{name}": tensor for name, tensor in stored.items()}, "m", (8, 128))


@pytest.mark.model
def test_a_checkpoint_that_lacks_a_part_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    quantized, _ = make_checkpoints(model, 4, tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight.quant_map"]
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    with pytest.raises(ServiceError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight\.quant_map"):
        Engine(quantized, CoreLimits(max_num_seqs=8, max_num_batched_tokens=24), "torch")


def test_weights_stored_as_other_numbers_are_refused() -> None:
    settings = {"quant_method": "bitsandbytes", "bnb_4bit_quant_storage": "bfloat16"}
    with pytest.raises(SettingsError, match="bnb_4bit_quant_storage bfloat16; uint8 is"):
        prepared("bitsandbytes", {"quantization_config": settings})
