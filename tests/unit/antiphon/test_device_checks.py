"""The doctor's device section, with programs on PATH that answer as nvidia-smi does."""

import os
from pathlib import Path

import pytest

from antiphon.advice import device_checks, doctor
from antiphon.advice.device_checks import Check, driver_check, gpus, ip_forward, npus
from antiphon.shared.config import EngineSettings

TWO = "0, GPU-a, NVIDIA L20, 46068, 550.54.15, 8.9\n1, GPU-b, NVIDIA L20, 46068, 550.54.15, 8.9\n"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory on PATH, besides the shell's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(folder))
    return folder


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def smi(folder: Path, cards: str, processes: str = "") -> None:
    """Makes an nvidia-smi that lists these cards and processes."""
    listed = f"case $1 in --query-gpu=*) printf '%s' '{cards}' ;; *) printf '%s' '{processes}' ;; esac"
    program(folder, "nvidia-smi", listed)


def test_without_a_gpu_the_cpu_is_said_to_do(programs: Path) -> None:
    assert gpus("", 0) == [Check("ok", "GPU", "no NVIDIA GPU: runs on the CPU")]
    smi(programs, "")
    assert gpus("", 0) == [Check("ok", "GPU", "nvidia-smi lists none: runs on the CPU")]


@pytest.mark.spec("S-DIS-051")
def test_cards_are_counted_with_driver_memory_and_capability(programs: Path) -> None:
    smi(programs, TWO)
    assert gpus("12.6", 2) == [
        Check("ok", "GPU", "2 NVIDIA GPUs"),
        Check("ok", "GPU driver", "550.54.15, enough for the CUDA 12.6 of torch"),
        Check("ok", "GPU 0", "NVIDIA L20, 45 GiB, compute capability 8.9"),
        Check("ok", "GPU 1", "NVIDIA L20, 45 GiB, compute capability 8.9"),
    ]


@pytest.mark.spec("S-DIS-051")
def test_a_card_that_another_process_holds_is_a_warning_that_names_it(programs: Path) -> None:
    smi(programs, TWO, "GPU-b, 1, /usr/bin/python3, 40000\n")
    *_, first, second = gpus("12.6", 2)
    assert first.state == "ok"
    assert (second.state, second.finding.partition("; ")[2]) == ("warn", "in use by process 1 (python3, 40000 MiB)")
    assert "stop it, or its container" in second.advice


@pytest.mark.spec("S-DIS-051")
def test_a_driver_that_fails_or_is_too_old_says_to_install_another(programs: Path) -> None:
    program(programs, "nvidia-smi", "echo Failed to initialize NVML: Driver/library version mismatch; exit 18")
    (check,) = gpus("12.6", 0)
    assert (check.state, "version mismatch" in check.finding) == ("warn", True)
    assert "install NVIDIA's driver again" in check.advice
    assert driver_check("525.60.13", "12.6").state == driver_check("580.1", "13.0").state == "ok"
    assert driver_check("550.54.15", "").finding == "550.54.15"
    old = driver_check("470.82.01", "12.6")
    assert (old.state, old.finding) == ("warn", "470.82.01 is too old for the CUDA 12.6 of torch")
    assert "525.60.13 or newer" in old.advice


def test_a_torch_that_cannot_use_the_cards_is_a_warning(programs: Path) -> None:
    smi(programs, TWO)
    assert gpus("", 0)[0].finding == "2 NVIDIA GPUs, and a torch without CUDA: runs on the CPU"
    assert gpus("12.6", 1)[0].finding == "2 NVIDIA GPUs, of which torch can use 1"
    smi(programs, "0, GPU-a, Tesla V100, 16160, 550.54.15, 7.0\n")
    assert gpus("12.6", 1)[-1].finding.endswith("compute capability 7.0: PyTorch's operations, no bfloat16 kernels")


@pytest.mark.spec("S-DIS-051")
def test_an_npu_is_found_and_said_to_be_of_no_use(programs: Path, tmp_path: Path) -> None:
    assert npus(tmp_path) == []
    (tmp_path / "davinci4").touch()
    (check,) = npus(tmp_path)
    assert (check.state, check.finding) == ("warn", "Ascend NPU found: Antiphon does not compute on it")
    program(programs, "npu-smi", "")
    assert npus(tmp_path / "none") == [check]


@pytest.mark.spec("S-DIS-052")
def test_where_docker_is_installed_packets_must_be_forwarded(programs: Path, tmp_path: Path) -> None:
    path = tmp_path / "ip_forward"
    path.write_text("0\n")
    assert ip_forward(path) == []
    assert doctor.docker().finding == "not installed; only `make up` needs it"
    program(programs, "docker", "echo 27.0.1")
    assert doctor.docker() == Check("ok", "docker", "27.0.1")
    (check,) = ip_forward(path)
    assert (check.state, check.finding) == ("warn", "net.ipv4.ip_forward is 0")
    assert "sysctl -w net.ipv4.ip_forward=1" in check.advice
    assert "/etc/sysctl.conf" in check.advice
    path.write_text("1\n")
    assert ip_forward(path)[0].state == "ok"
    assert ip_forward(tmp_path / "none") == []


@pytest.mark.spec("S-DIS-051")
def test_the_section_is_part_of_the_doctors_report(
    monkeypatch: pytest.MonkeyPatch, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smi(programs, TWO, "GPU-a, 7, train, 100\n")
    program(programs, "npu-smi", "")
    program(programs, "docker", "echo 27.0.1")
    monkeypatch.setattr(doctor, "torch_devices", lambda: ("12.6", 2))
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}/usr/bin:/bin")
    assert doctor.run(EngineSettings(), 0) == 0
    printed = capsys.readouterr().out
    for line in ("ok    GPU          2 NVIDIA GPUs", "warn  GPU 0 ", "process 7 (train, 100 MiB)", "warn  NPU "):
        assert line in printed
    assert "  ip_forward   net.ipv4.ip_forward is " in printed
    assert device_checks.device_checks("12.6", 2)
