"""Packed weights kept in a file: a later start maps them, computes the same, and trusts nothing that changed."""

# pyright: reportPrivateUsage=false

import errno
import io
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from numpy.typing import NDArray

from antiphon.services.engine.backends.cpu import packed as module
from antiphon.services.engine.backends.cpu.worker import CpuWorker
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.shared.models import overrides
from tests.model.harness import Engine, make_prompt, settings
from tests.models import make_model
from tests.native.libraries import make_cpu_worker
from tests.quantized.checkpoints import make_checkpoints

LIMITS = CoreLimits(max_num_seqs=4, max_num_batched_tokens=64, enable_prefix_caching=False)
PROMPTS = [make_prompt(length) for length in (3, 40)]


@pytest.fixture(autouse=True)
def _kept_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_S", 0.0)
    monkeypatch.setattr(module, "PACKED_BYTES_MIN", 0)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., CpuWorker]]:
    """Loads a model with a cache of packed weights, and waits until these are kept."""
    workers: list[CpuWorker] = []

    def load(directory: Path, cache: str = "", **flags: object) -> CpuWorker:
        asked = settings(directory, weight_cache=cache or str(tmp_path / "kept"), max_num_seqs=4, **flags)
        worker = make_cpu_worker(directory, asked)
        workers.append(worker)
        keeping = worker._decoder._cache
        if keeping is not None:
            keeping.wait()
        return worker

    yield load
    for worker in workers:
        worker.close()


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "kept").glob("*.packed"))


def mapped(worker: CpuWorker) -> int:
    return worker._mapped_bytes()


def numbers(worker: CpuWorker) -> list[NDArray[np.float64]]:
    return Engine.around(worker, LIMITS).log_probabilities(PROMPTS, 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", ["heads of 136 dimensions", "experts beside a shared one", "biases for positions"])
def test_a_later_start_reads_the_file_and_computes_the_same(
    shape: str, dtype: str, odd_models: Callable[[str], Path], start: Callable[..., CpuWorker], tmp_path: Path
) -> None:
    first = start(odd_models(shape), dtype=dtype)
    assert mapped(first) == 0
    later = start(odd_models(shape), dtype=dtype)
    assert mapped(later) == files(tmp_path)[0].stat().st_size
    assert later._decoder.model.weight_bytes() == first._decoder.model.weight_bytes()
    for before, after in zip(numbers(first), numbers(later), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("quantization", ["ifq", "ifq_w8a8", "ifq_w4a8", "ifq_nf4"])
@pytest.mark.parametrize("shape", ["heads of 136 dimensions", "experts beside a shared one"])
def test_quantized_weights_are_kept_too(
    shape: str, quantization: str, odd_models: Callable[[str], Path], start: Callable[..., CpuWorker], tmp_path: Path
) -> None:
    directory = odd_models(shape)
    check_quantized(start, directory, tmp_path, quantization=quantization)
    # The same model in another form has a file of its own.
    assert mapped(start(directory, dtype="bfloat16")) == 0
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize("layout", ["gptq", "gptq, inputs in another order", "awq", "gptq, 8 bits, symmetric"])
def test_weights_of_prepared_checkpoints_are_kept_too(
    layout: str, start: Callable[..., CpuWorker], tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", "llama", dtype="bfloat16", hidden_size=64, intermediate_size=128)
    directory, _ = make_checkpoints(model, layout, tmp_path / "prepared")
    check_quantized(start, directory, tmp_path)


def check_quantized(start: Callable[..., CpuWorker], directory: Path, tmp_path: Path, **flags: object) -> None:
    first = start(directory, dtype="bfloat16", **flags)
    assert mapped(first) == 0
    later = start(directory, dtype="bfloat16", **flags)
    assert mapped(later) == files(tmp_path)[0].stat().st_size
    decoders = first._decoder, later._decoder
    assert decoders[0].quantized_bytes == decoders[1].quantized_bytes > 0
    assert decoders[0].quantized_from_bytes == decoders[1].quantized_from_bytes
    for before, after in zip(numbers(first), numbers(later), strict=True):
        np.testing.assert_array_equal(before, after)


def test_what_changes_is_packed_again_and_the_former_file_goes(start: Callable[..., CpuWorker], tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model", "llama", dtype="bfloat16")
    start(directory)
    (former,) = files(tmp_path)
    os.utime(directory / "model.safetensors", ns=(1, 1))
    assert mapped(start(directory)) == 0
    (present,) = files(tmp_path)
    assert present != former
    # Another type of numbers is another model.
    start(directory, dtype="float32")
    assert len(files(tmp_path)) == 2


def test_other_fields_of_the_config_are_packed_on_their_own(
    start: Callable[..., CpuWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overrides, "_CACHE", str(tmp_path / "overrides"))
    directory = make_model(tmp_path / "model", "llama", dtype="bfloat16")
    start(directory)
    other = overrides.with_overrides(directory, '{"rms_norm_eps": 0.5}')
    assert mapped(start(other)) == 0
    assert len(files(tmp_path)) == 2
    assert mapped(start(other)) > 0


def test_a_damaged_file_is_not_used(
    start: Callable[..., CpuWorker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_model(tmp_path / "model", "llama", dtype="bfloat16")
    start(directory)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    for damaged in (whole[:-5000], whole[:6], b"\xff" * 200):
        path.write_bytes(damaged)
        with caplog.at_level(logging.WARNING):
            assert mapped(start(directory)) == 0
        assert "cannot be used" in caplog.text
        assert path.read_bytes() == whole


def test_nothing_is_taken_from_where_others_can_write(start: Callable[..., CpuWorker], tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model", "llama", dtype="bfloat16")
    start(directory)
    (tmp_path / "kept").chmod(0o777)
    assert mapped(start(directory)) == 0
    (tmp_path / "kept").chmod(0o700)
    assert mapped(start(directory)) > 0


def test_it_can_be_switched_off(start: Callable[..., CpuWorker], tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model", "llama", dtype="bfloat16")
    assert mapped(start(directory, cache=module.OFF)) == 0
    assert not files(tmp_path)


def test_a_worker_that_is_closed_meanwhile_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_S", 60.0)
    directory = make_model(tmp_path / "model", "llama", dtype="bfloat16")
    worker = make_cpu_worker(directory, settings(directory, weight_cache=str(tmp_path / "kept")))
    worker.close()
    assert not (tmp_path / "kept").exists()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a file system in memory")
def test_weights_are_not_kept_in_memory_a_second_time(
    start: Callable[..., CpuWorker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_model(tmp_path / "model", "llama", dtype="bfloat16")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as cache, caplog.at_level(logging.INFO):
        start(directory, cache=cache)
        assert "is in memory" in caplog.text
        assert not list(Path(cache).iterdir())


def test_a_write_that_fails_leaves_nothing_and_is_said(
    start: Callable[..., CpuWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    directory = make_model(tmp_path / "model", "llama", dtype="bfloat16")
    monkeypatch.setattr(module.os, "fsync", fail)
    start(directory)
    assert "packed weights are not kept for the next start: " in caplog.text
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [".lock"]


def test_a_file_is_written_in_whole_portions_wherever_its_matrices_end(
    start: Callable[..., CpuWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    portion, sizes = 2 * module.ALIGNMENT, list[int]()

    class Recorded(io.FileIO):
        def write(self, data: Any, /) -> int:
            sizes.append(len(data))
            return super().write(data)

    def record(descriptor: int, mode: str, buffering: int) -> io.BufferedWriter:
        return io.BufferedWriter(Recorded(descriptor, mode), buffering)

    monkeypatch.setattr(module, "_PORTION_BYTES", portion)
    monkeypatch.setattr(module.os, "fdopen", record)
    start(make_model(tmp_path / "model", "llama", dtype="bfloat16"))
    assert sum(sizes) == files(tmp_path)[0].stat().st_size
    assert set(sizes[:-1]) == {portion}


def test_a_write_that_is_stopped_leaves_nothing(
    start: Callable[..., CpuWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StoppedAfterTheFirst(module.WeightCache):
        def _write_piece(self, file: BinaryIO, piece: module.Piece) -> bool:
            written = super()._write_piece(file, piece)
            self._stop.set()
            return written

    directory = make_model(tmp_path / "model", "llama", dtype="bfloat16")
    monkeypatch.setattr(module, "WeightCache", StoppedAfterTheFirst)
    start(directory)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [".lock"]


def test_small_weights_are_not_kept(
    start: Callable[..., CpuWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PACKED_BYTES_MIN", 2**30)
    start(make_model(tmp_path / "model", "llama", dtype="bfloat16"))
    assert not files(tmp_path)


def test_the_last_models_are_kept_and_only_so_many(
    start: Callable[..., CpuWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PACKED_FILES_MAX", 2)
    directories = [make_model(tmp_path / str(number), "llama", dtype="bfloat16") for number in range(3)]
    for age, directory in enumerate(directories):
        start(directory)
        for path in files(tmp_path):
            status = path.stat()
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 10**9 * (3 - age)))
    assert len(files(tmp_path)) == 2
    assert [mapped(start(directory)) > 0 for directory in reversed(directories)] == [True, True, False]
