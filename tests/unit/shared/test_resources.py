"""What a process and its children use: processor time, memory, GPUs."""

import os
import subprocess
import sys

import pytest

from antiphon.shared.messages import DeviceMemory
from antiphon.shared.observability import resources

BURN = """
import os, sys
while sum(os.times()[:2]) < 0.3:
    pass
data = bytearray(64 << 20)
for at in range(0, len(data), 4096):
    data[at] = 1
print("done", flush=True)
sys.stdin.read()
"""


def test_a_child_counts_while_it_lives_and_its_processor_time_afterwards():
    before = resources.read()
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        resources.add_child(child.pid)
        assert child.stdout.readline() == b"done\n"
        during = resources.read()
        child.stdin.close()
        child.wait()
        resources.remove_child(child.pid)
    after = resources.read()
    assert before is not None
    assert during is not None
    assert after is not None
    assert during.num_cores == len(os.sched_getaffinity(0))
    assert during.cpu_s - before.cpu_s >= 0.25
    assert after.cpu_s - before.cpu_s >= 0.25
    assert during.rss_bytes - after.rss_bytes >= 60 << 20
    assert during.gpus == ()


def test_a_child_that_is_gone_counts_nothing():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    resources.add_child(child.pid)
    try:
        assert resources.read() is not None
    finally:
        resources.remove_child(child.pid)


class Cuda:
    """Two GPUs as torch.cuda shows them."""

    free = (3, 5)

    def get_device_name(self, device: int) -> str:
        return f"GPU {device}"

    def mem_get_info(self, device: int) -> tuple[int, int]:
        return self.free[device], 10


def test_gpus_have_the_numbers_of_the_machine_and_those_of_children_are_added(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6, 7")
    monkeypatch.setattr(resources, "_gpus", {})
    monkeypatch.setattr(resources, "_remote_gpus", {})
    monkeypatch.setattr(resources, "_children", {1})
    monkeypatch.setattr(resources, "_gpus_read", (-resources.GPU_INTERVAL_S, ()))
    resources.add_gpu(Cuda(), 0)
    other = DeviceMemory(index=7, name="GPU 1", used_bytes=5, total_bytes=10)
    resources.set_gpus_of_child(1, (other,))
    resources.set_gpus_of_child(2, (DeviceMemory(index=9, name="nobody's", used_bytes=0, total_bytes=1),))
    assert resources.gpus() == (DeviceMemory(index=6, name="GPU 0", used_bytes=7, total_bytes=10), other)
