"""The measures against lack of memory: spelled as the engine was started, without those that were taken already."""

import pytest
import torch

from antiphon.cli import main
from antiphon.launch import devices, launcher
from antiphon.offline.engine_args import engine_args
from antiphon.services.engine.backends import load
from antiphon.services.engine.worker.capacity.memory_advice import measures
from antiphon.settings import ServeSettings
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import converted, to_argv

FOUR = {
    "flags": ["--quantization=ifq", "--max-model-len=4096", "--gpu-memory-utilization=0.95", "--enforce-eager"],
    "variables": ["QUANTIZATION=ifq", "MAX_MODEL_LEN=4096", "GPU_MEMORY_UTILIZATION=0.95", "--enforce-eager"],
    "arguments": ["quantization='ifq'", "max_model_len=4096", "gpu_memory_utilization=0.95", "enforce_eager=True"],
}


@pytest.mark.spec("S-DEP-023")
@pytest.mark.parametrize("spelling", FOUR)
def test_the_four_measures_are_named_in_the_spelling_of_the_start(spelling: str) -> None:
    settings = EngineSettings(advice_spelling=spelling)
    told = measures(settings, on_cpu=False, context=100_000)
    assert all(word in told for word in FOUR[spelling]), told
    on_cpu = measures(settings, on_cpu=True, context=100_000)
    assert [word in on_cpu for word in FOUR[spelling]] == [True, True, True, False]


@pytest.mark.spec("S-DEP-023")
def test_measures_that_were_taken_are_left_out() -> None:
    taken = {
        "--quantization=ifq": {"quantization": "ifq_nf4"},
        "--gpu-memory-utilization=0.95": {"gpu_memory_utilization": 0.95},
        "--enforce-eager": {"enforce_eager": True},
    }
    for word, changes in taken.items():
        told = measures(EngineSettings(**changes), on_cpu=False, context=5000)  # type: ignore[arg-type]
        assert [each in told for each in FOUR["flags"]] == [each != word for each in FOUR["flags"]]
    assert "--max-model-len" not in measures(EngineSettings(), on_cpu=False, context=4096)
    assert "--quantization" not in measures(EngineSettings(), on_cpu=False, prepared=True)


@pytest.mark.spec("S-DEP-023")
def test_each_way_to_start_tells_its_engines_how_to_spell(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[ServeSettings] = []
    monkeypatch.setenv(devices.VARIABLE, "0")
    monkeypatch.setattr(launcher, "serve", lambda settings, _environ: found.append(settings) or 0)
    assert main(["serve"]) == main(["run"]) == 0
    assert [converted(each, EngineSettings).advice_spelling for each in found] == ["flags", "variables"]
    assert "--advice-spelling=variables" in to_argv(converted(found[1], EngineSettings))
    assert engine_args(model="m").settings().advice_spelling == "arguments"


@pytest.mark.spec("S-DEP-023", "S-DEP-024")
def test_a_device_without_room_for_the_weights_ends_the_start_with_the_measures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(load, "_load", full)
    with pytest.raises(ServiceError) as refused:
        load.load_worker(EngineSettings(device="cpu", advice_spelling="variables"))
    assert "does not fit into the memory of the device (CUDA out of memory)" in refused.value.message
    assert "QUANTIZATION=ifq" in refused.value.message
