"""Blocks in the host's memory: how many, and the copies between them and the device's."""

import pytest
import torch

from antiphon.services.engine.core.plan import StepPlan
from antiphon.services.engine.worker.capacity import host_cache
from antiphon.services.engine.worker.capacity.host_cache import copy_blocks, plan_host_blocks
from antiphon.services.engine.worker.capacity.kv_cache import KvCache, KvPlan
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import SettingsError
from tests.unit.engine.worker.test_kv_cache import BLOCK_BYTES, DESCRIPTION

KV = KvPlan(num_blocks=10, max_model_len=64)


def blocks(swap_space: float | None, **settings: object) -> int:
    given = EngineSettings(swap_space=swap_space, block_size=16, **settings)  # type: ignore[arg-type]
    return plan_host_blocks(given, DESCRIPTION, KV, torch.float32)


@pytest.mark.spec("S-SRV-044")
def test_the_swap_space_holds_as_many_blocks_as_fit_and_rows_can_use() -> None:
    assert blocks(0.0) == 0
    assert blocks(7 * BLOCK_BYTES / 2**30) == 7
    assert blocks(0.5, max_num_seqs=3) == 3 * 4


@pytest.mark.spec("S-SRV-044")
def test_more_than_the_memory_is_refused_and_the_default_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cache, "free_bytes", lambda: 2**30)
    with pytest.raises(SettingsError, match=r"--swap-space: 4 GiB is more than the 1.0 GiB"):
        blocks(4.0)
    monkeypatch.setattr(host_cache, "free_bytes", lambda: 8 * BLOCK_BYTES)
    assert blocks(None) == 4
    monkeypatch.setattr(host_cache, "free_bytes", lambda: 64 * 2**30)
    assert blocks(None, max_num_seqs=10**9) == 4 * 2**30 // BLOCK_BYTES


def cache_of(first: float, num_blocks: int) -> KvCache:
    """Block b of layer 0 is full of first + b as keys and of its negative as values."""
    keys = (first + torch.arange(num_blocks)).to(torch.float32)[:, None, None, None].expand(-1, 4, 2, 8).clone()
    return KvCache((keys,), (-keys,))


def test_copies_go_out_then_in_then_from_block_to_block() -> None:
    device, host = cache_of(0, 6), cache_of(100, 3)
    plan = StepPlan(step=1, swap_out=((2, 0), (3, 1)), swap_in=((2, 3), (0, 4)), copies=((4, 5), (1, 0)))
    copy_blocks(plan, device, host)
    for sign, on_device, on_host in (
        (1, device.key_caches, host.key_caches),
        (-1, device.value_caches, host.value_caches),
    ):
        assert [sign * float(block.mean()) for block in on_host[0]] == [2, 3, 102]
        assert [sign * float(block.mean()) for block in on_device[0]] == [1, 1, 2, 102, 2, 2]
