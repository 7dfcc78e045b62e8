"""Which GPU each engine gets, and what is refused."""

from pathlib import Path

import pytest

from antiphon.cli import main
from antiphon.launch import devices, launcher
from antiphon.launch.devices import Assignment, beside, for_engines, visible
from antiphon.launch.launcher import assign_gpus
from antiphon.settings import ServeSettings
from antiphon.shared.flags import SettingsError


def test_gpus_are_what_the_variable_names_or_else_the_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible({}, tmp_path) == ["0", "1"]
    assert visible({}, tmp_path / "none") == []
    assert visible({"CUDA_VISIBLE_DEVICES": "3, 1"}, tmp_path) == ["3", "1"]
    assert visible({"CUDA_VISIBLE_DEVICES": "GPU-8a,-1,2"}, tmp_path) == ["GPU-8a"]
    assert visible({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


@pytest.mark.spec("S-SRV-014", "S-SRV-105:workers")
def test_each_engine_gets_a_gpu_of_its_own() -> None:
    assert for_engines([1, 1], "auto", ["3", "1"]) == Assignment(("3", "1"))
    assert for_engines([1], "auto", ["0"]) == Assignment()
    for engines, device, gpus in ((4, "auto", []), (4, "cpu", ["0"])):
        assert for_engines([1] * engines, device, gpus) == Assignment()


@pytest.mark.spec("S-SRV-014", "S-SRV-105:workers")
def test_more_engines_than_gpus_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible", lambda _environ: ["0", "1"])
    with pytest.raises(SettingsError, match=r"--engines \(--worker-num\): 3 engines need a GPU each, and 2 can"):
        launcher.serve(ServeSettings(engines=3), {})


@pytest.mark.spec("S-SRV-105:workers")
def test_gpus_that_stay_unused_are_told() -> None:
    found = for_engines([1, 1], "cuda", ["0", "1", "2"])
    assert found.ids == ("0", "1")
    assert found.notices == ("1 of 3 GPUs stay unused: 2 engines are started (--engines, --worker-num)",)


@pytest.mark.spec("S-SRV-105:tensor-parallel")
def test_engines_of_several_gpus_need_all_of_them_and_what_is_left_over_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("TP", "2"), ("WORKER_NUM", "2"), ("MODEL_PATH", ""), (devices.VARIABLE, "0,1,2")):
        monkeypatch.setenv(name, value)
    assert main(["run"]) == 78
    told = capsys.readouterr().err
    assert "--tensor-parallel-size (TP) x --worker-num: 2 engines of 2 devices need 4, and 3 can be used here" in told
    models = [ServeSettings(engines=2, tensor_parallel_size=2)]
    assert assign_gpus(models, ["0", "1", "2", "3"]) == Assignment(("0,1", "2,3"))
    found = assign_gpus(models, ["0", "1", "2", "3", "4"])
    assert found.ids == ("0,1", "2,3")
    assert found.notices == ("1 of 5 GPUs stay unused: 2 engines are started (--engines, --worker-num)",)


def test_an_engine_that_is_started_beside_others_gets_the_gpus_that_are_used_least() -> None:
    assert beside([1], ["3", "1", "2"], ["3", "2"]) == ("1",)
    assert beside([1, 1], ["0", "1"], ["0"]) == ("1", "0")
    assert beside([2], ["0", "1", "2"], ["0", "0", "1", "elsewhere"]) == ("2,1",)
    with pytest.raises(SettingsError, match="an engine needs 2 GPUs, and 1 can be used here"):
        beside([2], ["0"], [])
