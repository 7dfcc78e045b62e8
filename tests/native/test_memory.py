"""What loading a model takes, in a process of its own: pages of the mapped file are the system's, the rest counts."""

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from antiphon.services.engine.backends.cpu.native import Library
from antiphon.services.engine.models.registry import find_family
from tests.model.harness import make_worker
from tests.native.libraries import library
from tests.native.shapes import SHAPES

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"architectures": ["LlamaForCausalLM"], "intermediate_size": 2560},
    "experts": {"architectures": ["MixtralForCausalLM"], "intermediate_size": 320, "num_local_experts": 8},
}
ALLOCATOR_KEEPS = 24 * 2**20
"""Of freed parameters, whatever the model's size, until loading ends."""
_LOAD = """
import sys, threading, torch
from pathlib import Path
from antiphon.services.engine.backends.cpu.decoder import NativeDecoder
from antiphon.services.engine.backends.cpu.library import load_library
from antiphon.services.engine.models.registry import find_family
from antiphon.services.engine.worker.loading.model_files import read_config
directory = Path(sys.argv[1])
config = read_config(directory)
family, library = find_family(config), load_library()
description = family.describe(config)
warm = torch.ones(64, 64).to(torch.bfloat16) @ torch.ones(64, 64).to(torch.bfloat16)
def anonymous():
    fields = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in fields if line.startswith(("RssAnon", "VmSwap"))) * 1024
before, peak, done = anonymous(), [0], threading.Event()
def watch():
    while not done.wait(0.0005):
        peak[0] = max(peak[0], anonymous() - before)
watcher = threading.Thread(target=watch)
watcher.start()
with torch.inference_mode():
    kept = NativeDecoder(library, description, directory, family.layout(description), torch.bfloat16, 16, 1)

done.set()
watcher.join()
print(peak[0], anonymous() - before, kept.model.weight_bytes())
"""


def write_model(directory: Path, fields: dict[str, Any], dtype: torch.dtype) -> int:
    """Zeroed weights; gives the bytes of the model as bfloat16."""
    config = {**SIZES, **fields}
    family = find_family(config)
    sources = [source for parameter in family.layout(family.describe(config)) for source in parameter.sources]
    save_file(
        {source.name: torch.ones(source.shape, dtype=dtype) for source in sources}, directory / "model.safetensors"
    )
    (directory / "config.json").write_text(json.dumps(config))
    return sum(torch.Size(source.shape).numel() for source in sources) * 2


@pytest.mark.parametrize(("kind", "stored"), [("dense", torch.float32), ("experts", torch.bfloat16)], ids=str)
def test_loading_needs_little_more_memory_than_the_model(kind: str, stored: torch.dtype, tmp_path: Path) -> None:
    library()
    size = write_model(tmp_path, MODELS[kind], stored)
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(tmp_path)], capture_output=True, text=True, check=True, timeout=200
    )
    peak, after, packed = map(int, done.stdout.split())
    assert peak < 1.1 * size + ALLOCATOR_KEEPS
    assert after < 1.03 * size
    assert packed < size


@pytest.mark.parametrize("closes", [True, False])
def test_a_model_that_nobody_has_any_more_is_freed_once(
    closes: bool, odd_models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[int] = []
    call = Library.call

    def watched(self: Library, name: str, *arguments: Any) -> int:
        if name == "free":
            freed.append(*arguments)
        return call(self, name, *arguments)

    monkeypatch.setattr(Library, "call", watched)
    worker = make_worker("native", odd_models(next(iter(SHAPES))))
    if closes:
        worker.close()
        assert len(freed) == 1
    del worker
    gc.collect()
    assert len(freed) == 1
