"""Free memory as machine and containers see it, what a piece of work takes, and what the heap keeps."""

import ctypes
import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from antiphon.services.engine.worker.capacity import memory

MIB = 2**20


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 1000 MiB free; tests add control groups."""
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CONTROL_GROUPS", tmp_path / "cgroup")
    write(tmp_path / "proc/meminfo", f"MemTotal: 9 kB\nMemAvailable: {1000 * 1024} kB\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group(folder: Path, limit: str, used_mib: int, cold_mib: int = 0) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{used_mib * MIB}\n")
    write(folder / "memory.stat", f"anon 1\ninactive_file {cold_mib * MIB}\n")


def test_free_memory_is_measured() -> None:
    assert 2**20 < memory.free_bytes() < 2**50


def test_without_a_limit_the_machine_counts(system: Path) -> None:
    assert memory.free_bytes() == 1000 * MIB
    write(system / "proc/self/cgroup", "0::/\n")
    group(system / "cgroup", "max", 999)
    assert memory.free_bytes() == 1000 * MIB


@pytest.mark.spec("S-SRV-040")
def test_a_containers_limit_counts_less_what_is_used_and_cannot_be_dropped(system: Path) -> None:
    write(system / "proc/self/cgroup", "0::/\n")
    group(system / "cgroup", str(600 * MIB), 250, cold_mib=50)
    assert memory.free_bytes() == 400 * MIB


def test_the_narrowest_of_the_groups_around_the_process_counts(system: Path) -> None:
    write(system / "proc/self/cgroup", "0::/outer/inner\n")
    group(system / "cgroup/outer", str(300 * MIB), 100)
    group(system / "cgroup/outer/inner", str(900 * MIB), 100)
    assert memory.free_bytes() == 200 * MIB
    group(system / "cgroup/outer", str(50 * MIB), 100)
    assert memory.free_bytes() == 0


def test_limits_of_the_first_version_count_too(system: Path) -> None:
    write(system / "proc/self/cgroup", "5:devices:/\n4:memory,cpu:/pod\n")
    write(system / "cgroup/memory/pod/memory.limit_in_bytes", f"{500 * MIB}")
    write(system / "cgroup/memory/pod/memory.usage_in_bytes", f"{200 * MIB}")
    write(system / "cgroup/memory/pod/memory.stat", f"total_inactive_file {100 * MIB}")
    assert memory.free_bytes() == 400 * MIB


def test_the_peak_of_a_piece_of_work_is_measured_and_begins_anew() -> None:
    np.ones(200 * MIB, dtype=np.uint8)
    assert 64 * MIB <= memory.peak_growth(lambda: np.ones(64 * MIB, dtype=np.uint8)) < 100 * MIB
    assert memory.peak_growth(lambda: None) < 32 * MIB


def scatter() -> list[bytes]:
    """Fills the heap with 100 MiB, frees all of it but a grain in each hundred: nothing of it is at the heap's end."""
    pieces = [bytes(8000) for _ in range(100 * MIB // 8000)]
    for piece in pieces:
        assert len(piece) == 8000
    return pieces[::100]


def test_free_pages_of_the_heap_are_kept_up_to_a_bound() -> None:
    memory.return_free_heap()
    before = memory.held_bytes()
    guard = memory.HeapGuard(50 * MIB)
    kept = scatter()
    if memory.held_bytes() - before < 60 * MIB:
        pytest.skip("this C library gives the pages back by itself")
    guard.after_step()
    assert memory.held_bytes() - before < 50 * MIB
    assert kept


def test_little_is_not_given_back() -> None:
    memory.return_free_heap()
    guard = memory.HeapGuard(500 * MIB)
    kept = scatter()
    before = memory.held_bytes()
    guard.after_step()
    assert memory.held_bytes() >= before - MIB
    assert kept


def test_a_file_that_is_mapped_is_read_before_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "table"
    with path.open("wb") as file:
        file.write(os.urandom(16 * MIB))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with path.open("rb") as file:
        numbers = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), dtype=np.uint8)
    if num_resident(numbers) == num_pages(numbers):
        pytest.skip("this system keeps the file in memory")
    memory.fetch(numbers.ctypes.data + 100, numbers.nbytes - 100)
    # A system that is short of memory takes some pages back while it reads others.
    wanted = 0.9 * num_pages(numbers)
    deadline = time.monotonic() + 60
    while num_resident(numbers) < wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_resident(numbers) >= wanted


def num_pages(numbers: NDArray[np.uint8]) -> int:
    return numbers.nbytes // mmap.PAGESIZE


def num_resident(numbers: NDArray[np.uint8]) -> int:
    """Pages of a mapping that need not be read any more."""
    states = (ctypes.c_ubyte * num_pages(numbers))()
    found = ctypes.CDLL(None).mincore(ctypes.c_void_p(numbers.ctypes.data), ctypes.c_size_t(numbers.nbytes), states)
    assert found == 0
    return sum(state & 1 for state in states)
