"""`--quantization fp8`: weights of 8 bits, floating point, made while plain ones are loaded, on NVIDIA's Hopper alone.

The rules are those of a Hopper; the products are computed by PyTorch's operations and by Triton's kernels on a CPU.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.backends.torch.worker import TorchWorker
from antiphon.services.engine.backends.triton.operations import TritonQuantizedLinear
from antiphon.services.engine.backends.triton.worker import TritonWorker
from antiphon.services.engine.models.decoder import Decoder
from antiphon.services.engine.models.layers.linear import QuantizedLinear
from antiphon.services.engine.quantization import choice
from antiphon.services.engine.quantization.rounding import quantize_fp8
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.shared.flags import SettingsError
from antiphon.shared.settings.quantization import Device
from tests.model.harness import make_prompt, make_worker, settings
from tests.model.looped import run
from tests.models import greedy_reference, make_model

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
PROMPT, NUM_TOKENS = make_prompt(9), 4
ROUNDED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    return make_model(directory, "qwen2", seed=3)


def rounded(model: Path, target: Path) -> Path:
    """A plain checkpoint of the weights that those of 8 bits stand for."""
    target.mkdir()
    tensors = load_file(model / "model.safetensors")
    matrices = [name for name in tensors if name.removesuffix(".weight").endswith(ROUNDED) and name.endswith("weight")]
    assert len(matrices) == 2 * len(ROUNDED)
    changed = {name: quantize_fp8(tensors[name]).dequantized() for name in matrices}
    assert all(not torch.equal(changed[name], tensors[name]) for name in matrices)
    save_file({**tensors, **changed}, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.spec("S-QNT-017")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_hopper_computes_with_weights_of_8_bits_made_while_loading(
    backend: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_device", lambda _device, native: Device("an H100", native, multiplies_fp8=True))
    worker = make_worker(backend, model, quantization="fp8", max_num_seqs=2)
    assert isinstance(worker, TorchWorker | TritonWorker)
    model_of_worker = worker._model
    assert isinstance(model_of_worker, Decoder)
    for layer in model_of_worker._weights.layers:
        assert isinstance(layer.o, QuantizedLinear | TritonQuantizedLinear)
        weight = layer.o.weight if isinstance(layer.o, TritonQuantizedLinear) else layer.o._weight
        assert weight.kind == "fp8"
    found = run(worker, [(PROMPT, {"temperature": 0.0})], NUM_TOKENS)
    assert found.tokens["r0"] == greedy_reference(rounded(model, tmp_path / "rounded"), PROMPT, NUM_TOKENS)


@pytest.mark.spec("S-QNT-017")
@pytest.mark.parametrize(("capability", "able"), [((9, 0), True), ((10, 0), True), ((8, 9), False), ((7, 0), False)])
def test_another_device_refuses_and_names_the_forms_that_it_has(
    capability: tuple[int, int], able: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA Test")
    chosen = settings(model, quantization="fp8")
    if able:
        form = choice.weight_form(chosen, model, {}, torch.device("cuda"), native=False)
        assert form.name == "fp8"
        assert form.quantize is not None
        assert isinstance(form.quantize("o", torch.ones(2, 32)), QuantizedWeight)
    else:
        with pytest.raises(SettingsError, match=r"\(Hopper\) or newer; this machine computes on NVIDIA Test; use ifq"):
            choice.weight_form(chosen, model, {}, torch.device("cuda"), native=False)
    with pytest.raises(SettingsError, match="this machine computes on a CPU; use ifq, ifq_w8a8, ifq_w4a8 or ifq_nf4"):
        load_worker(chosen)
