"""The probe's matrix multiplication: the faster type counts, and none keeps a slow processor busy for minutes."""

from functools import partial

import pytest
import torch

from bench.limits_of_machine import probe


def test_a_processor_that_is_slow_in_bfloat16_is_measured_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {torch.bfloat16: 1.3e9, torch.float32: 150e9}
    tried: list[tuple[torch.dtype, int]] = []

    def best(call: partial[torch.Tensor], tries: int) -> float:
        matrix: torch.Tensor = call.args[0]
        tried.append((matrix.dtype, len(matrix)))
        return 2 * len(matrix) ** 3 / rates[matrix.dtype]

    monkeypatch.setattr(probe, "best", best)
    assert probe.gemm_rate(1) == pytest.approx(150e9)
    assert [side for dtype, side in tried if dtype is torch.bfloat16] == [256]
    assert [side for dtype, side in tried if dtype is torch.float32] == list(probe.GEMM_SIDES)


def test_only_the_types_that_are_asked_for_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "best", lambda call, tries: 1.0 if call.args[0].dtype is torch.float32 else 1e-3)
    assert probe.gemm_rate(1, ("float32",)) == pytest.approx(2 * 256**3)
