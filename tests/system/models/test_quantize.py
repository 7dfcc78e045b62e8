"""`antiphon quantize` on the demo model as a user calls it: quality on unseen stories, and serving what it wrote."""

import contextlib
import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from antiphon import LLM
from antiphon.cli import main
from antiphon.services.engine.quantization.rounding import quantize_int4
from antiphon.shared.models.model_files import DEMO_DIRECTORY
from antiphon.shared.settings.quantization import SMOOTHQUANT_FILE
from infra.demo_model.evaluate import unseen_stories
from tests.system.models.test_quantized import PROMPT, perplexity
from tests.system.served import ROOT, Served, fetch, until_the_end

pytestmark = pytest.mark.timeout(600)
RATIOS = {"weight_only_int8": 1.01, "smooth_quant": 1.03, "awq": 1.06, "gptq": 1.06}
"""Largest perplexity on unseen stories, times that of the original."""
SIZES = {"weight_only_int8": 0.52, "smooth_quant": 0.61, "awq": 0.42, "gptq": 0.42}
"""Largest weights, times the original's. A fifth of the demo model is its embedding, which has 8 bits in the first."""
KEPT = 0.61
"""The same for `weight_only_int8` with an embedding that keeps its type."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Algorithm → directory."""
    target = tmp_path_factory.mktemp("quantized")
    for algorithm in RATIOS:
        flags = (
            "-i",
            str(DEMO_DIRECTORY),
            "-o",
            str(target / algorithm),
            "-quant_type",
            algorithm,
            "-tp",
            "2",
            "-t",
            "bf16",
        )
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            assert main(["quantize", *flags]) == 0
        for word in ("weights", "perplexity", "worst"):
            assert word in told.getvalue()
    return {algorithm: target / algorithm for algorithm in RATIOS}


def story_perplexity(model: Path) -> float:
    with LLM(model=str(model), kv_cache_memory_gb=0.1) as llm:
        return perplexity(llm, unseen_stories(40))


def rounded_to_nearest(target: Path) -> Path:
    """The demo model with its matrices in 4 bits, each weight to the nearest value of its group of 128."""
    shutil.copytree(DEMO_DIRECTORY, target)
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if "_proj" in name:
            tensors[name] = quantize_int4(tensor, 128).dequantized().to(torch.bfloat16)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.spec("S-QNT-003", "S-QNT-011", "S-QNT-012", "S-QNT-013", "S-QNT-014")
def test_quantized_weights_cost_little_quality(written: dict[str, Path], tmp_path: Path) -> None:
    plain = story_perplexity(DEMO_DIRECTORY)
    nearest = story_perplexity(rounded_to_nearest(tmp_path / "nearest"))
    measured = {algorithm: story_perplexity(directory) for algorithm, directory in written.items()}
    for algorithm, ratio in RATIOS.items():
        assert measured[algorithm] <= ratio * plain, algorithm
    assert measured["awq"] < nearest
    assert measured["gptq"] < nearest
    original = (DEMO_DIRECTORY / "model.safetensors").stat().st_size
    for algorithm, directory in written.items():
        size = sum(path.stat().st_size for path in directory.glob("model-*.safetensors"))
        assert size <= SIZES[algorithm] * original


def test_the_embedding_of_int8_files_keeps_its_type_if_asked(tmp_path: Path) -> None:
    target, original = tmp_path / "kept", (DEMO_DIRECTORY / "model.safetensors").stat().st_size
    flags = ("-i", str(DEMO_DIRECTORY), "-o", str(target), "-quant_type", "weight_only_int8", "-tp", "1", "-t", "bf16")
    assert main(["quantize", *flags, "--no-round-embedding"]) == 0
    size = sum(path.stat().st_size for path in target.glob("model-*.safetensors"))
    assert SIZES["weight_only_int8"] * original < size <= KEPT * original
    assert story_perplexity(target) <= RATIOS["weight_only_int8"] * story_perplexity(DEMO_DIRECTORY)


@pytest.mark.spec("S-QNT-018", "S-QNT-022", "S-QNT-023")
def test_the_file_of_smooth_quant_is_served_alone(written: dict[str, Path], tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(written["smooth_quant"], alone)
    for path in alone.glob("model*.safetensors"):
        path.unlink()
    texts = set()
    # Both spellings of the method give the same engine in tests/quantized/test_tool.py.
    for words in (("-q", "smoothquant"), ()):
        with until_the_end(Served("--model", str(alone), "--device=cpu", *words)) as served:
            body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "model": str(alone)}
            texts.add(fetch(served, "POST", "/v1/completions", body).json["choices"][0]["text"])
            assert "quantization: smoothquant" in served.output
    assert len(texts) == 1
    (alone / SMOOTHQUANT_FILE).unlink()
    assert f"{SMOOTHQUANT_FILE} is not in {alone}; make it: antiphon quantize" in refused(alone, "smoothquant")


@pytest.mark.spec("S-QNT-011", "S-QNT-012")
def test_another_method_than_that_of_the_files_is_refused(written: dict[str, Path]) -> None:
    assert "gptq contradicts the model, whose weights are prepared with awq" in refused(written["awq"], "gptq")
    assert "ifq contradicts" in refused(written["awq"], "ifq")


def refused(model: Path, method: str) -> str:
    """What a server that does not start prints."""
    command = [
        sys.executable,
        "-m",
        "antiphon",
        "serve",
        "--model",
        str(model),
        "--device=cpu",
        "-q",
        method,
        "--port=0",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 78
    return done.stderr
