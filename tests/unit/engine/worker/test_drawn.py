"""Weights that are drawn at random (`--load-format dummy`): no files, the same numbers each time, refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.backends.refusals import check_model
from antiphon.services.engine.models.registry import find_family
from antiphon.services.engine.worker.loading.drawn import DrawnTensors
from antiphon.services.engine.worker.loading.model_files import read_config
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError

CPU = torch.device("cpu")


@pytest.fixture
def bare(checkpoint: Callable[..., Path]) -> Path:
    """A model directory without weights."""
    directory = checkpoint()
    (directory / "model.safetensors").unlink()
    return directory


def settings(directory: Path, **options: Any) -> EngineSettings:
    return EngineSettings(model=str(directory), device="cpu", load_format="dummy", **options)


def test_tensors_have_the_scale_of_their_inputs_and_are_the_same_each_time(bare: Path) -> None:
    config = read_config(bare)
    family = find_family(config)
    layout = family.layout(family.describe(config))
    one, other = DrawnTensors(layout, CPU), DrawnTensors(layout, CPU)
    assert len(one) == len(list(one)) > 0
    for parameter in layout:
        for source in parameter.sources:
            drawn = one[source.name]
            assert drawn.dtype == torch.bfloat16
            assert drawn.shape == source.shape
            assert torch.equal(drawn, other[source.name])
            if len(source.shape) > 1:
                assert float(drawn.float().std()) == pytest.approx(source.shape[-1] ** -0.5, rel=0.1)
            else:
                assert float(drawn.float().mean()) == pytest.approx(1.0, abs=0.1)
    first, second = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv")
    assert not torch.equal(one[first], one[second])


@pytest.mark.parametrize("options", [{"cpu_backend": "torch"}, {"cpu_backend": "auto", "quantization": "ifq"}])
def test_a_worker_needs_no_files_of_weights(bare: Path, options: dict[str, str]) -> None:
    check_model(settings(bare), bare, smoothquant=False)
    worker = load_worker(settings(bare, **options, max_num_seqs=2, num_gpu_blocks_override=8))
    assert worker.facts().vocab_size > 0
    worker.close()
    with pytest.raises(ServiceError, match="neither"):
        load_worker(EngineSettings(model=str(bare), device="cpu"))


def test_a_quantized_checkpoint_is_refused(bare: Path) -> None:
    path = bare / "config.json"
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
    with pytest.raises(SettingsError, match="--load-format=dummy: the weights are drawn unquantized"):
        load_worker(settings(bare))


def test_an_architecture_that_is_not_known_is_refused(bare: Path) -> None:
    path = bare / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["BertModel"], "model_type": "bert"}))
    for refuse in (load_worker, lambda one: check_model(one, bare, smoothquant=False)):
        with pytest.raises(SettingsError, match="--load-format=dummy: this architecture runs through transformers"):
            refuse(settings(bare))
