"""The rules of `--quantization`: what follows from the setting, the model's files and the device."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from antiphon.cli import main
from antiphon.shared.flags import SettingsError
from antiphon.shared.settings.quantization import SMOOTHQUANT_FILE, Device, Quantization, choose, read_model_config

CPU = Device("a CPU")
TORCH = Device("a CPU", multiplies_quantized=False)
HOPPER = Device("an H100", multiplies_fp8=True)
AWQ = {"quant_method": "awq", "bits": 4}
GPTQ = {"quant_method": "gptq", "bits": 4}
ROWS = {"num_bits": 8, "type": "int", "dynamic": True}
W8A16 = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}
W8A8 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 8}, "input_activations": ROWS}},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory whose files have the right names; the rules read no weights."""
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def result(asked: str, model: Path, config: dict[str, Any] | None = None, device: Device = CPU) -> str:
    return choose(asked, model, {"quantization_config": config} if config else {}, device).name


@pytest.mark.spec("S-QNT-010", "S-QNT-030")
@pytest.mark.parametrize("asked", ["", "None", "none"])
def test_plain_weights_stay_as_they_are(asked: str, model: Path) -> None:
    assert choose(asked, model, {}, CPU) == Quantization()


@pytest.mark.spec("S-QNT-030")
@pytest.mark.parametrize("config", [AWQ, GPTQ, W8A16])
@pytest.mark.parametrize("asked", ["", "None"])
def test_without_an_option_the_config_of_the_model_decides(asked: str, config: dict[str, Any], model: Path) -> None:
    assert result(asked, model, config) == config["quant_method"]


@pytest.mark.parametrize(
    ("asked", "online"),
    [
        ("ifq", "ifq"),
        ("weight_only_int8", "ifq"),
        ("ifq_w8a8", "ifq_w8a8"),
        ("ifq_w4a8", "ifq_w4a8"),
        ("ifq_nf4", "ifq_nf4"),
    ],
)
def test_plain_weights_are_rounded_while_loading(asked: str, online: str, model: Path) -> None:
    chosen = choose(asked, model, {}, CPU)
    assert (chosen.online, chosen.method) == (online, None)


@pytest.mark.spec("S-SRV-103")
def test_fp8_needs_a_hopper(model: Path) -> None:
    assert choose("fp8", model, {}, HOPPER).online == "fp8"
    for device in (CPU, TORCH, Device("an A100")):
        with pytest.raises(SettingsError, match=rf"Hopper\) or newer; this machine computes on {device.name}; use ifq"):
            choose("fp8", model, {}, device)


def test_weights_of_4_bits_and_rows_of_8_are_for_cpus(model: Path) -> None:
    assert choose("ifq_w4a8", model, {}, TORCH).online == "ifq_w4a8"
    with pytest.raises(SettingsError, match="ifq_w4a8 is for CPUs; this machine computes on an H100; use ifq_nf4"):
        choose("ifq_w4a8", model, {}, replace(HOPPER, multiplies_w4a8=False))


@pytest.mark.spec("S-QNT-021")
def test_auto_goes_through_its_rules_in_order(model: Path) -> None:
    assert result("auto", model, device=TORCH) == "none"
    assert result("auto", model) == "ifq"
    (model / SMOOTHQUANT_FILE).touch()
    assert result("auto", model) == "smoothquant"
    assert result("auto", model, device=TORCH) == "none"
    for config in (AWQ, GPTQ, W8A16):
        assert result("auto", model, config) == config["quant_method"]
    assert result("auto", model, W8A8) == "smoothquant"


@pytest.mark.spec("S-QNT-022", "S-SRV-104")
@pytest.mark.parametrize("asked", ["smoothquant", "smooth_quant"])
def test_smoothquant_needs_its_file(asked: str, model: Path) -> None:
    with pytest.raises(SettingsError, match=f"{SMOOTHQUANT_FILE} is not in {model}; make it: antiphon quantize"):
        choose(asked, model, {}, CPU)
    (model / SMOOTHQUANT_FILE).touch()
    assert result(asked, model) == result(asked, model, W8A8) == "smoothquant"
    (model / "model.safetensors").unlink()
    assert result("", model) == "smoothquant"


@pytest.mark.spec("S-QNT-031")
@pytest.mark.parametrize(
    "asked", ["none", "ifq", "ifq_w8a8", "ifq_w4a8", "ifq_nf4", "fp8", "gptq", "gpt", "smoothquant", "bitsandbytes"]
)
def test_what_contradicts_a_prepared_model_is_refused_with_both_names(asked: str, model: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        choose(asked, model, {"quantization_config": AWQ}, HOPPER)
    named = {"gpt": "gptq"}.get(asked, asked)
    assert named in str(refused.value)
    assert "awq" in str(refused.value)
    assert "Leave the option out" in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "config", "name"),
    [("awq", AWQ, "awq"), ("gptq", GPTQ, "gptq"), ("gpt", GPTQ, "gptq"), ("weight_only_int8", W8A16, W8A16)],
)
def test_the_name_of_a_prepared_form_confirms_it(asked: str, config: dict[str, Any], name: Any, model: Path) -> None:
    assert result(asked, model, config) == (name if isinstance(name, str) else name["quant_method"])


@pytest.mark.parametrize("asked", ["awq", "gptq", "gpt", "bitsandbytes", "gguf", "compressed-tensors"])
def test_a_prepared_form_that_the_model_does_not_have_is_refused(asked: str, model: Path) -> None:
    with pytest.raises(SettingsError, match="is not a checkpoint prepared with"):
        choose(asked, model, {}, CPU)


def test_a_method_that_is_not_served_is_named(model: Path) -> None:
    with pytest.raises(SettingsError, match="quantization_config for hqq; weights of awq, gptq"):
        choose("", model, {"quantization_config": {"quant_method": "hqq"}}, CPU)


@pytest.mark.spec("S-SRV-035", "S-SRV-103", "S-SRV-104")
def test_the_server_refuses_before_anything_starts(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUANTIZATION", raising=False)
    start = ["serve", str(model), "--device=cpu", "--port=0"]
    for words, said in (
        (["--quantization=fp8"], "fp8 needs an NVIDIA GPU of compute capability 9.0 (Hopper)"),
        (["-q", "smoothquant"], SMOOTHQUANT_FILE),
        (["-q", "awq"], "no quantization_config"),
    ):
        assert main([*start, *words]) == 78
        assert said in capsys.readouterr().err
    (model / "config.json").write_text(json.dumps({"quantization_config": GPTQ}))
    for variable, said in (("awq", "awq contradicts the model"), ("ifq", "ifq contradicts"), ("none", "none contr")):
        monkeypatch.setenv("QUANTIZATION", variable)
        assert main(start) == 78
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main([*start, "-q", "int3"])
    assert end.value.code == 2
    printed = capsys.readouterr().err
    for name in ("none", "auto", "ifq", "ifq_nf4", "fp8", "smoothquant", "awq", "gptq", "gpt", "weight_only_int8"):
        assert name in printed


def test_a_config_that_cannot_be_read_is_left_to_the_engine(tmp_path: Path) -> None:
    assert read_model_config(tmp_path) == {}
    (tmp_path / "config.json").write_text("[1]")
    assert read_model_config(tmp_path) == {}
