"""In which types models compute: asked for, stored, or what the hardware does well."""

from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.services.engine.worker import dtypes
from antiphon.services.engine.worker.dtypes import choose_cache_dtype, choose_dtype, choose_torch_dtype
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import flags_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.spec("S-SRV-033")
@pytest.mark.parametrize(
    ("asked", "stored", "device", "chosen"),
    [
        ("auto", "float32", CPU, torch.float32),
        ("auto", "bfloat16", CPU, torch.bfloat16),
        ("auto", "float16", CPU, torch.bfloat16),
        ("auto", "float32", CUDA, torch.float16),
        ("auto", "float16", CUDA, torch.float16),
        ("auto", "bfloat16", CUDA, torch.bfloat16),
        ("float", "bfloat16", CPU, torch.float32),
        ("half", "float32", CPU, torch.float16),
        ("bfloat16", "float32", CPU, torch.bfloat16),
    ],
)
def test_the_type_is_the_one_asked_for_or_follows_from_checkpoint_and_device(
    asked: str, stored: Any, device: torch.device, chosen: torch.dtype
) -> None:
    assert choose_dtype(asked, stored, device) == chosen


@pytest.mark.spec("S-SRV-033")
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32"])
def test_a_type_that_is_asked_for_wins_over_checkpoint_and_device(stored: Any, device: torch.device) -> None:
    types = {
        "half": torch.float16,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "float": torch.float32,
        "float32": torch.float32,
    }
    [field] = [item for item in flags_of(EngineSettings) if item.name == "dtype"]
    assert set(field.metadata["choices"]) == {"auto", *types}
    assert {asked: choose_dtype(asked, stored, device) for asked in types} == types


def on_a_processor(monkeypatch: pytest.MonkeyPatch, machine: str, capability: str, free: int) -> None:
    monkeypatch.setattr(dtypes.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(dtypes, "free_bytes", lambda: free)


@pytest.mark.spec("S-SRV-033")
@pytest.mark.parametrize(
    ("machine", "capability", "asked", "stored", "device", "chosen"),
    [
        ("x86_64", "AVX2", "auto", "bfloat16", CPU, torch.float32),
        ("x86_64", "AVX2", "auto", "float16", CPU, torch.float32),
        ("x86_64", "AVX2", "auto", "float32", CPU, torch.float32),
        ("x86_64", "AVX2", "bfloat16", "bfloat16", CPU, torch.bfloat16),
        ("x86_64", "AVX2", "auto", "bfloat16", CUDA, torch.bfloat16),
        ("x86_64", "AVX512", "auto", "bfloat16", CPU, torch.bfloat16),
        ("aarch64", "DEFAULT", "auto", "bfloat16", CPU, torch.bfloat16),
    ],
)
def test_pytorch_computes_in_32_bits_where_it_multiplies_16_slowly(
    machine: str,
    capability: str,
    asked: str,
    stored: Any,
    device: torch.device,
    chosen: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    on_a_processor(monkeypatch, machine, capability, 2**30)
    assert choose_torch_dtype(asked, stored, device, tmp_path) == chosen


def test_weights_too_large_for_32_bits_stay_as_they_are_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    on_a_processor(monkeypatch, "x86_64", "AVX2", 3000)
    assert choose_torch_dtype("auto", "bfloat16", CPU, tmp_path) == torch.bfloat16
    assert "C++ compiler or more memory" in caplog.text
    on_a_processor(monkeypatch, "x86_64", "AVX2", 4000)
    assert choose_torch_dtype("auto", "bfloat16", CPU, tmp_path) == torch.float32


@pytest.mark.spec("S-SRV-036")
def test_the_cache_has_the_models_type_or_8_bits() -> None:
    kinds = {"auto": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
    for asked, chosen in {**kinds, "fp8_e5m2": torch.float8_e5m2}.items():
        assert choose_cache_dtype(asked, torch.bfloat16) == chosen
