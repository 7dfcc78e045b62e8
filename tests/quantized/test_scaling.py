"""Factors that `antiphon quantize` moves between operations: they do not change what a layer computes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.services.engine.models.layout import ignored_names
from antiphon.services.engine.models.registry import find_family
from antiphon.services.engine.quantizer.job import Job
from antiphon.services.engine.quantizer.layer import Layer, Stream
from antiphon.services.engine.quantizer.outer import OuterParts
from antiphon.services.engine.quantizer.plan import make_plan
from antiphon.services.engine.quantizer.scaling import LayerTensors
from antiphon.services.engine.worker.loading.checkpoint import Checkpoint
from antiphon.services.engine.worker.loading.model_files import read_config
from tests.model_variants import MORE_VARIANTS
from tests.models import make_model

pytestmark = pytest.mark.model
RECURRENT = {"mix_in", "mix_out"}
ATTENDING = {"qkv", "o"}
MLP = {"up", "down"}
EXPERTS = {"experts.up", "experts.down"}
SHARED = {"shared.up", "shared.down"}
VARIANTS: dict[str, set[str]] = {
    "qwen3_5": RECURRENT | ATTENDING | MLP,
    "qwen3_5 with wide heads": RECURRENT | ATTENDING | MLP,
    "qwen3_5 with experts": RECURRENT | ATTENDING | EXPERTS | SHARED,
    "qwen3_next": RECURRENT | ATTENDING | EXPERTS | SHARED,
    "gemma4": {"qkv", *MLP},
    "gemma4 with layers that share keys": {"qkv", *MLP},
    "gemma4 with experts": {"qkv", *MLP, *EXPERTS},
    "llama4": ATTENDING | MLP | EXPERTS | SHARED,
    "laguna": ATTENDING | MLP | EXPERTS | SHARED,
    "granite with state spaces": RECURRENT | ATTENDING | MLP,
    "bamba with wide heads": RECURRENT | ATTENDING | MLP,
    "falcon_h1": {"qkv", "mix_in", "o", *MLP},
    "falcon_h1 with norms": RECURRENT | ATTENDING | MLP,
    "falcon_h1 with norms before gates": RECURRENT | ATTENDING | MLP,
    "nemotron_h with experts": {*RECURRENT, *ATTENDING, "up", "experts.up", "shared.up"},
    "nemotron_h with narrow experts": {*RECURRENT, *ATTENDING, "experts.up", "shared.up"},
    "mamba2": RECURRENT,
    "mamba with biases": {"mix_in"},
    "jamba": {"mix_in", *ATTENDING, *MLP, *EXPERTS},
    "kimi_linear": RECURRENT | ATTENDING | MLP | EXPERTS | SHARED,
    "kimi_linear with wide heads": {*RECURRENT, *ATTENDING, "q_up", *MLP, *EXPERTS, *SHARED},
    "deepseek_v2 lite": ATTENDING | MLP | EXPERTS | SHARED,
    "deepseek_v3 with wide latents": {*ATTENDING, "q_up", *MLP, *EXPERTS, *SHARED},
    "youtu": {*ATTENDING, "q_up", *MLP},
    "afmoe": ATTENDING | MLP | EXPERTS | SHARED,
    "lfm3": RECURRENT | ATTENDING | MLP,
    "olmo2": {"o", "down"},
    "phi3": {"qkv", *MLP},
}
"""Name of a model → the matrices whose inputs can be divided in some layer."""


def batches() -> list[torch.Tensor]:
    return [torch.randint(3, 300, (2, 30), generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_layer_with_divided_inputs_computes_the_same(name: str, tmp_path: Path) -> None:
    family, fields = MORE_VARIANTS[name]
    model = make_model(tmp_path / "model", family, seed=7, dtype="float32", **fields)
    config = read_config(model)
    family_of = find_family(config)
    description = family_of.describe(config)
    job = Job(model=model, output=tmp_path, algorithm="weight_only_int8", tensor_parallel=1, dtype="bf16")
    plan = make_plan(description, family_of.layout(description), job)
    generator, divided = torch.Generator().manual_seed(2), set[str]()
    with Checkpoint(model) as checkpoint, torch.inference_mode():
        checkpoint.check(plan.parameters.values(), ignored_names(description))
        outer = {s.name: checkpoint.stored(s)[1] for p in plan.outer() for s in p.sources}
        stream = OuterParts(plan, outer).embed(batches())
        for index in range(description.num_layers):
            sources = {s.name: checkpoint.stored(s) for p in plan.layer(index) for s in p.sources}
            tensors: dict[str, Any] = {theirs: tensor.float().clone() for theirs, tensor in sources.values()}
            names = {source: theirs for source, (theirs, _) in sources.items()}
            plain = Layer(plan, index, {key: tensor.clone() for key, tensor in tensors.items()}, None)
            layer = LayerTensors(plan, index, tensors, names, torch.float32)
            for site in plan.sites(index):
                width = next(iter(layer.matrices(site).values())).shape[1]
                factors = layer.divide_inputs(site, 0.5 + 1.5 * torch.rand(width, generator=generator))
                assert (factors is not None) == layer.can_divide(site)
                divided |= set(site.matrices) if factors is not None else set()
            before = plain(stream)
            assert_close(Layer(plan, index, tensors, None)(stream), before, stream)
            stream = before
    assert divided == VARIANTS[name]


def assert_close(one: Stream, other: Stream, inputs: Stream) -> None:
    """Both streams differ by little of what the layer adds to its inputs."""
    for ours, theirs, before in zip(one.hidden, other.hidden, inputs.hidden, strict=True):
        assert (ours - theirs).norm() < 1e-4 * (theirs - before).norm()
