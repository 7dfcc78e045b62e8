"""Queries, keys and values of different types in a GGUF file, which the C++ backend keeps and multiplies apart."""

# pyright: reportPrivateUsage=false

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.services.engine.backends.cpu import packed
from antiphon.services.engine.backends.cpu.worker import CpuWorker
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.services.engine.worker.loading import checkpoint
from antiphon.shared.config import EngineSettings
from antiphon.shared.models.model_files import model_directory
from tests.gguf_files import Kind, write_gguf
from tests.model.harness import Engine, make_prompt, settings
from tests.models import make_model
from tests.native.libraries import make_cpu_worker
from tests.quantized.test_gguf import WIDE, check

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
LIMITS = CoreLimits(max_num_seqs=4, max_num_batched_tokens=64, enable_prefix_caching=False)
PROMPTS = [make_prompt(length) for length in (3, 40)]
Q4_K_M = {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "token_embd": Kind.Q6_K, "output.": Kind.Q6_K}
"""The layers of a mixture Q4_K_M with more bits; everything else is Q4_K."""
THREE = {"attn_q": Kind.Q8_0, "attn_v": Kind.Q6_K}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.shared.models.gguf_model.directory._CACHE", str(tmp_path / "cache"))


def mixture(kinds: dict[str, Kind]) -> Callable[[str], Kind]:
    return lambda name: next((kind for part, kind in kinds.items() if part in name), Kind.Q4_K)


def start(file: Path, tmp_path: Path, **flags: Any) -> CpuWorker:
    directory = model_directory(EngineSettings(model=str(file)))
    worker = make_cpu_worker(directory, settings(directory, **{"weight_cache": str(tmp_path / "kept"), **flags}))
    keeping = worker._decoder._cache
    if keeping is not None:
        keeping.wait()
    return worker


def parts_of(worker: CpuWorker) -> list[str]:
    return [weight.name for weight in worker._decoder.weights if weight.name.startswith("layer 0, qkv")]


@pytest.mark.parametrize("kinds", [Q4_K_M, THREE], ids=["two parts", "three parts"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # the second has biases
def test_parts_give_the_tokens_of_the_weights_that_they_stand_for(
    family: str, kinds: dict[str, Kind], tmp_path: Path
) -> None:
    model = make_model(tmp_path / "source", family, seed=5, **WIDE)
    plain = write_gguf(model, tmp_path / "m.gguf", mixture(kinds))
    check(tmp_path / "m.gguf", plain, "native")
    worker = start(tmp_path / "m.gguf", tmp_path)
    assert parts_of(worker) == [
        "layer 0, qkv",
        *(f"layer 0, qkv {number}" for number in range(1, 3 if kinds is THREE else 2)),
    ]
    worker.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parts_take_less_memory_than_one_matrix_and_compute_the_same(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(make_model(tmp_path / "source", "llama", seed=5, **WIDE), tmp_path / "m.gguf", mixture(Q4_K_M))
    apart = start(tmp_path / "m.gguf", tmp_path, dtype=dtype, weight_cache="off")
    numbers = Engine.around(apart, LIMITS).log_probabilities(PROMPTS, 3)
    monkeypatch.setattr(checkpoint, "_apart", lambda parts, rows: [])
    joined = start(tmp_path / "m.gguf", tmp_path, dtype=dtype, weight_cache="off")
    assert parts_of(joined) == ["layer 0, qkv"]
    assert apart._decoder.quantized_bytes < 0.95 * joined._decoder.quantized_bytes
    assert apart._decoder.model.weight_bytes() < joined._decoder.model.weight_bytes()
    # The matrix in 8 bits is multiplied as numbers of the model's type, the part in 4 bits exactly.
    tolerance = 1e-4 if dtype == "float32" else 0.1
    for one, other in zip(numbers, Engine.around(joined, LIMITS).log_probabilities(PROMPTS, 3), strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance)
    apart.close()
    joined.close()


def test_parts_are_kept_in_the_file_of_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "START_S", 0.0)
    monkeypatch.setattr(packed, "PACKED_BYTES_MIN", 0)
    write_gguf(make_model(tmp_path / "source", "qwen2", seed=5, **WIDE), tmp_path / "m.gguf", mixture(THREE))
    first = start(tmp_path / "m.gguf", tmp_path)
    later = start(tmp_path / "m.gguf", tmp_path)
    assert later._mapped_bytes() > 0
    assert parts_of(later) == parts_of(first) != ["layer 0, qkv"]
    assert later._decoder.model.weight_bytes() == first._decoder.model.weight_bytes()
    before, after = (Engine.around(worker, LIMITS).log_probabilities(PROMPTS, 3) for worker in (first, later))
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    first.close()
    later.close()


def weight(rows: int, kind: str, group: int) -> QuantizedWeight:
    columns = 64 if kind == "int8" else 32
    values = torch.zeros(rows, columns, dtype=torch.int8 if kind == "int8" else torch.uint8)
    scales = torch.ones(rows, 64 // group)
    return QuantizedWeight(kind=kind, values=values, shape=(rows, 64), scales=scales, group_size=group)  # pyright: ignore[reportArgumentType]


def test_only_whole_panels_of_different_types_are_apart() -> None:
    four, eight, short = weight(64, "int4", 32), weight(32, "int8", 32), weight(32, "int8", 16)
    heights = lambda *parts: [part.shape[0] for part in checkpoint._apart(list(parts), 32)]  # noqa: E731
    assert heights(four, four, short) == [128, 32]
    assert heights(four, eight, short) == [64, 32, 32]
    assert heights(four, four, four) == []
    assert heights(four, torch.zeros(32, 64)) == []
    assert heights(weight(48, "int4", 32), short) == []
    assert heights(four, weight(16, "int8", 16)) == [64, 16]
