"""`--cpu-offload-gb`: layers whose weights are in the host's memory. Here the places of a GPU are there too."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.services.engine.backends import offload as module
from antiphon.services.engine.backends.offload import Offload
from antiphon.services.engine.backends.triton import worker as triton
from antiphon.services.engine.backends.triton.worker import TritonWorker
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.worker.loading.tensors import tensors_of
from antiphon.shared.config import EngineSettings
from tests.model.harness import Engine, Models, greedy, make_kernel_worker, make_prompt
from tests.models import make_model
from tests.support.slow import slow_but

pytestmark = pytest.mark.model
CPU = torch.device("cpu")
LIMITS = CoreLimits(max_num_seqs=2, max_num_batched_tokens=24)


class LateCopies:
    """Copies that are done as late as they may be: when somebody waits. Until then the place has other numbers."""

    def __init__(self) -> None:
        self.pending: dict[int, tuple[Tensor, Tensor]] = {}
        self.told: list[tuple[str, int]] = []

    def begin(self, place: int, to: Tensor, source: Tensor) -> None:
        assert place not in self.pending, "a copy overtakes another one"
        to.fill_(0xAA)
        self.pending[place] = (to, source)
        self.told.append(("begin", place))

    def wait(self, place: int) -> None:
        to, source = self.pending.pop(place)
        to.copy_(source)
        self.told.append(("wait", place))


@pytest.fixture
def tall(tmp_path: Path) -> Path:
    """Seven layers."""
    return make_model(tmp_path, "llama", num_hidden_layers=7, dtype="float32")


@pytest.mark.spec("S-SRV-045")
@pytest.mark.parametrize(("layers_saved", "in_host"), slow_but([(1, 3), (90, 6)], [(1, 3), (3, 5), (4, 6), (90, 6)]))
def test_layers_are_copied_before_they_compute_and_tokens_stay_the_same(
    layers_saved: int,
    in_host: int,
    tall: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = [make_prompt(20), make_prompt(5)]
    plain = make_kernel_worker(tall, max_num_seqs=2)
    expected = Engine.around(plain, LIMITS).generate(prompts, greedy(4))
    copies, made = LateCopies(), list[Offload]()

    def make(settings: EngineSettings, num_layers: int, device: torch.device) -> Offload:
        size = sum(tensor.nbytes for _, tensor in tensors_of(plain._model._weights.layers[0]))
        made.append(Offload(int(0.95 * layers_saved * size), num_layers, device, copies))
        return made[0]

    monkeypatch.setattr(module, "_SMALL_BYTES", 256)
    monkeypatch.setattr(triton, "make_offload", make)
    with caplog.at_level(logging.INFO):
        worker = make_kernel_worker(tall, max_num_seqs=2)
    assert f"{in_host} of 7 layers are in the host's memory" in caplog.text
    assert Engine.around(worker, LIMITS).generate(prompts, greedy(4)) == expected
    assert worker._weights_bytes == plain._weights_bytes - made[0].saved_bytes
    assert made[0].saved_bytes >= 0.95 * min(layers_saved, 4) * made[0]._moved[0].source.nbytes
    # Two copies are always under way, or done: the next layers', also of the next step.
    assert len(copies.pending) == 2
    assert [name for name, _ in copies.told[:2]] == ["begin", "begin"]


@pytest.mark.slow
def test_layers_of_different_sizes_and_quantized_weights_share_the_places(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SMALL_BYTES", 256)
    for variant, flags in (("gemma4 with layers that share keys", {}), ("qwen3 with experts", {"quantization": "ifq"})):
        chosen: dict[str, Any] = {"max_num_seqs": 2, **flags}
        expected = Engine.around(make_kernel_worker(models(variant), **chosen), LIMITS).generate(
            [make_prompt(9)], greedy(3)
        )
        with monkeypatch.context() as patch:
            patch.setattr(
                triton, "make_offload", lambda _, num_layers, device: Offload(2**40, num_layers, device, LateCopies())
            )
            worker = make_kernel_worker(models(variant), **chosen)
        assert worker._offload is not None
        assert isinstance(worker, TritonWorker)
        assert Engine.around(worker, LIMITS).generate([make_prompt(9)], greedy(3)) == expected
