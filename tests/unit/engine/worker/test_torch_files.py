"""PyTorch's own checkpoint files: `pytorch_model.bin`, single and sharded."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.models.registry import find_family
from antiphon.services.engine.worker.loading.checkpoint import Checkpoint
from antiphon.services.engine.worker.loading.model_files import read_config, useful_threads
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError

CPU = torch.device("cpu")

_PEAK = """
import resource, sys, torch
from pathlib import Path
from antiphon.services.engine.models.registry import find_family
from antiphon.services.engine.worker.loading.model_files import read_config
from antiphon.services.engine.worker.loading.weights import load_weights
directory = Path(sys.argv[1])
config = read_config(directory)
family = find_family(config)
description = family.describe(config)
warm = torch.ones(64, 64) @ torch.ones(64, 64)
def anonymous():
    fields = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in fields if line.startswith(("RssAnon", "VmSwap"))) * 1024
before, peaks = anonymous(), []
import antiphon.services.engine.worker.loading.weights as weights
inner = weights._layer
def watched(*arguments):
    layer = inner(*arguments)
    peaks.append(anonymous() - before)
    return layer
weights._layer = watched
with torch.inference_mode():
    kept = load_weights(directory, description, family.layout(description), torch.float32, torch.device("cpu"))
print(max(peaks + [anonymous() - before]))
"""


def as_torch_files(directory: Path, shards: int, prefix: str = "pytorch_model") -> Path:
    """Rewrites a safetensors checkpoint; several files are named by the prefix and an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, directory / "pytorch_model.bin")
        return directory
    names = {name: f"{prefix}-{i % shards + 1:05}-of-{shards:05}.bin" for i, name in enumerate(sorted(tensors))}
    for file in set(names.values()):
        torch.save({name: tensors[name] for name in tensors if names[name] == file}, directory / file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    return directory


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    config = read_config(directory)
    family = find_family(config)
    layout = family.layout(family.describe(config))
    with Checkpoint(directory) as checkpoint:
        checkpoint.check(layout, frozenset())
        return {parameter.name: checkpoint.read(parameter, torch.float32, CPU) for parameter in layout}


@pytest.mark.spec("S-DEP-010")
@pytest.mark.parametrize(("shards", "prefix"), [(1, "pytorch_model"), (3, "pytorch_model"), (3, "model")])
def test_torch_files_give_the_same_weights_as_safetensors(
    checkpoint: Callable[..., Path], shards: int, prefix: str
) -> None:
    directory = checkpoint()
    expected = {name: tensor.clone() for name, tensor in read_all(directory).items()}
    given = read_all(as_torch_files(directory, shards, prefix))
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[name], expected[name]) for name in expected)
    assert useful_threads(directory) == 1


@pytest.mark.spec("S-DEP-010")
def test_safetensors_are_preferred(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint()
    (directory / "pytorch_model.bin").write_bytes(b"not weights")
    whole = read_all(directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "pytorch_model.bin").unlink()
    (directory / "model.safetensors").unlink()
    for prefix, ending, write in (("pytorch_model", "bin", None), ("model", "safetensors", save_file)):
        names = {name: f"{prefix}-{i % 2 + 1:05}-of-00002.{ending}" for i, name in enumerate(sorted(tensors))}
        (directory / f"{prefix}.{ending}.index.json").write_text(json.dumps({"weight_map": names}))
        for file in set(names.values()):
            if write is None:
                (directory / file).write_bytes(b"not weights")
            else:
                write({name: tensors[name] for name in tensors if names[name] == file}, directory / file)
    sharded = read_all(directory)
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)


def test_safetensors_alone_are_taken_where_they_are_asked_for(checkpoint: Callable[..., Path]) -> None:
    settings = EngineSettings(model=str(checkpoint()), device="cpu", load_format="safetensors")
    load_worker(settings)
    as_torch_files(Path(settings.model), 1)
    load_worker(replace(settings, load_format="auto"))
    with pytest.raises(SettingsError, match=r"--load-format=safetensors: .* has no file of that kind"):
        load_worker(settings)


class Reached:
    """Runs when a careless reader opens it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.matrix("S-08")
def test_a_file_that_would_run_code_is_refused_and_runs_nothing(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    directory, trace = checkpoint(), tmp_path / "reached"
    (directory / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Reached(trace)}, directory / "pytorch_model.bin")
    with pytest.raises(ServiceError, match="cannot be read as PyTorch weights"):
        read_all(directory)
    assert not trace.exists()


@pytest.mark.parametrize("content", [b"", b"damaged", [torch.zeros(1)], {"model.norm.weight": 3}])
def test_a_file_without_named_tensors_is_refused(checkpoint: Callable[..., Path], content: object) -> None:
    directory = checkpoint()
    (directory / "model.safetensors").unlink()
    path = directory / "pytorch_model.bin"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ServiceError, match=r"pytorch_model\.bin"):
        read_all(directory)


@pytest.mark.parametrize("shards", [1, 2])
def test_loading_needs_little_more_memory_than_the_model(checkpoint: Callable[..., Path], shards: int) -> None:
    """Pages of the mapped file belong to the system's cache; what counts is the memory of the process itself."""
    directory = checkpoint(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=10,
        num_attention_heads=8,
        head_dim=64,
    )
    as_torch_files(directory, shards)
    size = sum(path.stat().st_size for path in directory.glob("pytorch_model*.bin"))
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(directory)], capture_output=True, text=True, check=True, timeout=200
    )
    assert int(done.stdout) < 1.1 * size
