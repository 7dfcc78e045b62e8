"""The predicted memory against what engines of several shapes, types and forms then report."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.services.engine.backends.cpu.worker import CpuWorker
from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.backends.torch.worker import TorchWorker
from antiphon.services.engine.worker.capacity.kv_cache import bytes_per_block
from antiphon.services.engine.worker.estimate import CONTEXT_BYTES, Needs, gpu_room, predict
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import SettingsError
from antiphon.shared.models.adapters import with_adapters
from tests.adapters import make_adapter
from tests.models import make_model
from tests.quantized.checkpoints import make_checkpoints

GIB = 2**30
WIDE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "groups": ("llama", {**WIDE, "num_hidden_layers": 4}),
    "tied, a large vocabulary": (
        "qwen3",
        {**WIDE, "head_dim": 64, "vocab_size": 20000, "tie_word_embeddings": True},
    ),
    "experts": (
        "qwen3_moe",
        {**WIDE, "head_dim": 64, "num_experts": 8, "moe_intermediate_size": 512, "num_hidden_layers": 3},
    ),
    "latents": (
        "deepseek_v3",
        {
            **WIDE,
            "num_key_value_heads": 8,
            "num_hidden_layers": 3,
            "kv_lora_rank": 128,
            "q_lora_rank": 192,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "moe_intermediate_size": 256,
        },
    ),
    "streams": (
        "gemma3n_text",
        {
            **WIDE,
            "head_dim": 64,
            "intermediate_size": [1408, 1408, 2048, 1408],
            "hidden_size_per_layer_input": 64,
            "laurel_rank": 32,
        },
    ),
    "no gate": ("gpt_neox", {**WIDE, "num_hidden_layers": 4, "intermediate_size": 2048}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def make(shape: str) -> Path:
        if shape not in made:
            family, fields = SHAPES[shape]
            directory = tmp_path_factory.mktemp("model")
            made[shape] = make_model(directory, family, dtype="bfloat16", max_position_embeddings=4096, **fields)
        return made[shape]

    return make


def settings(directory: Path, **changes: Any) -> EngineSettings:
    base = {"model": str(directory), "device": "cpu", "threads": 1, "kv_cache_memory_gb": 0.1, "weight_cache": "off"}
    return EngineSettings(**{**base, **changes})


def compare(chosen: EngineSettings, directory: Path, rel: float = 0.1) -> Needs:
    """Loads an engine's worker, and compares its report with the prediction, which may be 20 % too high.

    The library's buffers depend on the processor, and the prediction is for those that need most. `rel`: the share by
    which it may be too low.
    """
    worker = load_worker(chosen)
    assert isinstance(worker, CpuWorker | TorchWorker)
    needs = predict(chosen, directory, "cpp" if isinstance(worker, CpuWorker) else "torch")
    report, facts = worker.memory, worker.facts()
    worker.close()
    assert report.weights_bytes == pytest.approx(needs.weights_bytes, rel=0.1)
    assert report.cache_bytes == facts.num_blocks * needs.block_bytes
    assert facts.max_model_len == needs.context
    cache = facts.num_blocks * needs.block_bytes
    predicted = needs.weights_bytes + cache + needs.rows_bytes + needs.step_bytes
    reported = report.weights_bytes + report.cache_bytes + report.rows_bytes + report.step_bytes
    assert (1 - rel) * reported <= predicted <= 1.2 * reported, (needs, report)
    return needs


@pytest.mark.spec("S-DEP-024")
@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ("groups", {"dtype": "float32", "max_num_seqs": 64}),
        ("tied, a large vocabulary", {"max_num_seqs": 64, "max_num_batched_tokens": 512}),
        ("groups", {"quantization": "ifq", "kv_cache_dtype": "fp8", "max_num_seqs": 8}),
        ("groups", {"quantization": "ifq_nf4", "max_model_len": 512, "max_num_seqs": 16}),
        ("groups", {"quantization": "ifq_w4a8", "max_model_len": 512, "max_num_seqs": 16}),
        ("tied, a large vocabulary", {"quantization": "ifq", "max_num_seqs": 16}),
        ("groups", {"cpu_backend": "torch", "dtype": "float32", "kv_cache_dtype": "fp8", "max_num_seqs": 8}),
        ("tied, a large vocabulary", {"cpu_backend": "torch", "dtype": "bfloat16", "max_num_seqs": 16}),
        ("experts", {"quantization": "ifq", "max_num_seqs": 16}),
        ("no gate", {"max_num_seqs": 16}),
        ("streams", {"max_num_seqs": 16}),
        ("streams", {"cpu_backend": "torch", "dtype": "float32", "max_num_seqs": 16}),
    ],
)
def test_an_engine_takes_what_was_predicted(shape: str, changes: dict[str, Any], model: Any) -> None:
    chosen = settings(model(shape), **changes)
    if changes.get("cpu_backend") != "torch":
        compare(chosen, model(shape))
        return
    # The buffers of PyTorch's operations are measured as growth of the process, which depends on what it has freed
    # before: as in an engine, nothing. Processors differ in the memory of their products' kernels.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        fresh.submit(compare, chosen, model(shape), 0.2).result()


@pytest.mark.parametrize("changes", [{}, {"kv_cache_dtype": "fp8", "dtype": "float32"}, {"quantization": "ifq"}])
def test_latents_take_what_was_predicted(changes: dict[str, Any], model: Any) -> None:
    """The step is a rougher estimate: the first products of a process and quantized ones leave memory behind."""
    directory = model("latents")
    chosen = settings(directory, max_num_seqs=8, **changes)
    worker = load_worker(chosen)
    assert isinstance(worker, CpuWorker)
    needs, report = predict(chosen, directory, "cpp"), worker.memory
    worker.close()
    size = 1 if "kv_cache_dtype" in changes else 2
    assert needs.token_bytes == 3 * (128 + 32) * size
    assert report.cache_bytes == worker.facts().num_blocks * needs.block_bytes
    assert report.weights_bytes == pytest.approx(needs.weights_bytes, rel=0.01)
    assert report.step_bytes / 3 < needs.step_bytes < report.step_bytes * 3
    on_gpu, small = (predict(settings(directory, max_model_len=n), directory, "gpu") for n in (4096, 1024))
    bare = [needs.step_bytes - needs.graphs_bytes for needs in (on_gpu, small)]
    assert bare[0] == bare[1], "the kernels read rows as they are"
    assert on_gpu.graphs_bytes > small.graphs_bytes > 0, "longer sequences leave more sums"


def test_matrices_of_latents_become_plain(tmp_path: Path) -> None:
    (plain := tmp_path / "source").mkdir()
    fields = SHAPES["latents"][1]
    quantized, _ = make_checkpoints(make_model(plain, "deepseek_v3", **fields), "fp8", tmp_path)
    chosen = settings(quantized, max_num_seqs=8, cpu_backend="torch")
    worker = load_worker(chosen)
    assert isinstance(worker, TorchWorker)
    assert worker.memory.weights_bytes == pytest.approx(predict(chosen, quantized, "torch").weights_bytes, rel=0.02)
    worker.close()


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq, inputs in another order", "gptq, 2 bits", "w8a16"])
def test_prepared_weights_take_what_their_files_say(name: str, tmp_path: Path) -> None:
    (plain := tmp_path / "source").mkdir()
    make_model(plain, "qwen2", **WIDE)
    quantized, _ = make_checkpoints(plain, name, tmp_path)
    # Beside so few weights the step's buffers are more than half, and how large they are depends on the processor.
    needs = compare(settings(quantized, max_num_seqs=8), quantized, rel=0.2)
    assert needs.form in ("awq", "gptq", "compressed-tensors")
    for file in quantized.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(SettingsError, match="has no weights, and prepared ones are counted in their files"):
        predict(settings(quantized), quantized, "cpp")


def test_adapters_take_what_was_predicted(model: Any, tmp_path: Path) -> None:
    directory = model("groups")
    chosen = settings(directory, cpu_backend="torch", dtype="float32", enable_lora=True, max_loras=2, max_cpu_loras=3)
    worker = load_worker(with_adapters(chosen))
    assert isinstance(worker, TorchWorker)
    assert worker.adapters is not None
    taken = 0
    for number in range(3):
        path = make_adapter(tmp_path / str(number), directory, rank=chosen.adapters.max_lora_rank, seed=number)
        found: Any = worker.adapters.load(path.name, str(path)).prepared
        taken += sum(delta.a.nbytes + delta.b.nbytes for delta in found.values())
    worker.close()
    needs = predict(chosen, directory, "torch")
    assert needs.adapters_bytes == pytest.approx(taken, rel=0.1)
    without = predict(replace(chosen, enable_lora=False), directory, "torch")
    assert needs.main_memory_bytes - without.main_memory_bytes == needs.adapters_bytes
    # A GPU holds slots for the adapters of running requests; the others stay in main memory.
    on_gpu, plain = predict(chosen, directory, "gpu"), predict(replace(chosen, enable_lora=False), directory, "gpu")
    assert 0 < on_gpu.adapters_bytes < needs.adapters_bytes
    room, more = (gpu_room(chosen, each, 8 * GIB).asked_bytes for each in (on_gpu, plain))
    assert more - room == on_gpu.adapters_bytes


def test_ranks_divide_weights_and_cache(model: Any) -> None:
    directory = model("groups")
    alone = predict(settings(directory), directory, "gpu")
    rank = predict(settings(directory, tensor_parallel_size=2), directory, "gpu")
    stage = predict(settings(directory, pipeline_parallel_size=4), directory, "gpu")
    assert rank.block_bytes == alone.block_bytes // 2
    assert stage.block_bytes == alone.block_bytes // 4
    assert alone.weights_bytes / 2 < rank.weights_bytes < alone.weights_bytes * 0.6
    assert rank.num_parameters == stage.num_parameters == alone.num_parameters
    # A rank's graphs have its heads only; stages have none.
    assert alone.graphs_bytes > rank.graphs_bytes > stage.graphs_bytes == 0


def test_a_gpu_keeps_for_the_cache_what_weights_and_steps_leave(model: Any) -> None:
    directory = model("groups")
    chosen = settings(directory, gpu_memory_utilization=0.5)
    needs = predict(chosen, directory, "gpu")
    room = gpu_room(chosen, needs, 8 * GIB)
    assert room.asked_bytes == 4 * GIB - needs.weights_bytes - CONTEXT_BYTES - needs.step_bytes
    assert gpu_room(chosen, needs, GIB).asked_bytes == 0
    assert needs.token_bytes == bytes_per_block(needs.description, 1, torch.bfloat16)
    assert needs.cache_bytes(65) == 2 * needs.block_bytes
    assert predict(replace(chosen, quantization="fp8"), directory, "gpu").weights_bytes < 0.6 * needs.weights_bytes


def test_what_transformers_runs_is_not_predicted(tmp_path: Path) -> None:
    make_model(tmp_path, "cohere")
    with pytest.raises(SettingsError, match="runs through transformers"):
        predict(settings(tmp_path), tmp_path, "cpp")
