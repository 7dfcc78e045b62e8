"""Faults of the disk with KV: each changes something, or says that it did not."""

import asyncio
import errno
import sys
from pathlib import Path

from antiphon.chaos import disk
from antiphon.chaos.schedule import DISK, LASTING, make_schedule

PROCESSES = {"engine": ("engine-1", "engine-2"), "nats": ("nats",)}
WRITER = """
import sys, time
file = open(sys.argv[1], "ab", buffering=0)
while True:
    try:
        file.write(b"x")
        print("written", flush=True)
    except OSError as error:
        print(error.errno, flush=True)
    time.sleep(0.01)
"""


def test_disks_have_faults_of_their_own_and_only_if_there_are_any() -> None:
    faults = make_schedule(1, 600, PROCESSES, disks=["engine-2"])
    own = [fault for fault in faults if fault.group == DISK]
    assert {fault.kind for fault in own} == {"flip", "cut", "full", "slow"}
    assert all(fault.targets == ("engine-2",) for fault in own)
    assert all((fault.kind in LASTING) == bool(fault.duration_s) for fault in own)
    assert not any(fault.group == DISK for fault in make_schedule(1, 600, PROCESSES))


def test_damage_changes_a_file(tmp_path: Path) -> None:
    assert "no KV" in disk.flip(tmp_path, 1.0)
    assert "no KV" in disk.cut(tmp_path, 1.0)
    path = tmp_path / "identity" / "segment.kv"
    path.parent.mkdir()
    path.write_bytes(bytes(1000))
    assert disk.flip(tmp_path, 1.0) == ""
    assert any(path.read_bytes())
    assert disk.cut(tmp_path, 1.0) == ""
    assert path.stat().st_size < 1000


def test_a_slow_disk_keeps_its_files(tmp_path: Path) -> None:
    path = tmp_path / "segment.kv"
    path.write_bytes(b"block" * 1000)
    assert disk.slow_down(tmp_path, 0.05) == ""
    assert path.read_bytes() == b"block" * 1000
    assert list(tmp_path.iterdir()) == [path]


async def test_a_full_disk_takes_nothing_for_a_while(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", WRITER, str(tmp_path / "file"), "--kv-disk-gb=1", f"--kv-disk-path={tmp_path}"]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert disk.directory_of(process.pid) == tmp_path
        assert await process.stdout.readline() == b"written\n"
        assert disk.have_disks({"engine-1": process.pid, "nats": 1}) == ["engine-1"]
        assert await disk.fill(process.pid, 0.2) == ""
        found = [await process.stdout.readline() for _ in range(5)]
        while found[-1] != b"written\n" or b"%d\n" % errno.EFBIG not in found:
            found.append(await process.stdout.readline())
    finally:
        process.kill()
        await process.wait()
    assert "no limit" in await disk.fill(process.pid, 0.0)
    assert disk.directory_of(process.pid) is None
