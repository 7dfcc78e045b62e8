"""Latent attention beyond the greedy text of its families: the cache's bytes, both ways to compute, options."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from antiphon.services.engine.backends.cpu.worker import CpuWorker
from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.backends.torch.worker import TorchWorker
from antiphon.services.engine.backends.triton.worker import TritonWorker
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.kernels import latent_attention as kernel
from antiphon.services.engine.kernels.paged_attention import AttentionShape, plan_attention
from antiphon.services.engine.models.decoder import Decoder
from antiphon.services.engine.models.layers.linear import QuantizedLinear
from antiphon.services.engine.models.registry import find_family
from antiphon.services.engine.worker.capacity.kv_cache import bytes_per_block
from antiphon.shared.flags import SettingsError
from tests.model.harness import NUM_TOKENS, Engine, Models, make_prompt, make_worker, settings
from tests.models import greedy_reference, make_model
from tests.quantized.checkpoints import make_checkpoints
from tests.unit.engine.kv.engines import PROMPT, run, started

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
CPU = torch.device("cpu")
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "max_position_embeddings": 163_840,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
"""The sizes of the model's own config.json."""
QUANTIZABLE: dict[str, Any] = {"hidden_size": 64, "kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16}
"""Inputs of every matrix are multiples of 32."""


def test_a_token_of_deepseek_v3_takes_the_bytes_of_its_latents() -> None:
    description = find_family(DEEPSEEK_V3).describe(DEEPSEEK_V3)
    assert bytes_per_block(description, 1, torch.bfloat16) == 61 * (512 + 64) * 2 == 70_272
    assert description.max_positions == 163_840
    # (0.1 ln 40 + 1)² / sqrt(128 + 64), as in the model's own code.
    assert description.query_scale == pytest.approx(0.1352337788608801)


@pytest.mark.parametrize(("backend", "width"), [("torch", 24), ("triton", 24), ("native", 32)])
def test_the_cache_has_one_row_a_token_and_layer(backend: str, width: int, models: Models) -> None:
    """Rows are padded in the C++ backend's cache, and travel without the padding."""
    worker = make_worker(backend, models("deepseek_v3"), kv_cache_memory_gb=0.01)
    assert isinstance(worker, TorchWorker | TritonWorker | CpuWorker)
    tensors = (worker._blocks.kv if isinstance(worker, TritonWorker) else worker._cache).parts
    layers, row = 2, 16 + 8
    assert [each.shape[1:] for each in tensors] == [(16, 1, width)] * layers
    assert worker.memory.cache_bytes == sum(each.nbytes for each in tensors)
    layout = worker.kv_memory().layout
    assert layout.num_bytes(16) == 16 * layers * row * 4
    if backend == "native":
        return
    with torch.inference_mode():
        tensors[1][3, 5] = torch.arange(row, dtype=torch.float32)
    block = np.zeros(layout.shape(16), dtype=np.uint8)
    worker.kv_memory().read(3, block)
    assert block[1, 0, 5, 0].view(np.float32).tolist() == list(range(row))


@pytest.mark.parametrize("context", [0, 40])
def test_latents_give_the_same_as_they_are_and_expanded(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a chunk behind a context, and beside it a sequence that decodes."""
    heads, nope, rope, value, rank, block_size, new = 3, 6, 4, 5, 16, 8, 30
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    lengths = np.array([context + new, 20])
    tables = np.arange(24).reshape(2, 12)
    cache, up = draw(24, block_size, 1, rank + rope), draw(heads, nope + value, rank)
    shape = AttentionShape(block_size=block_size, bytes_per_slot=4 * (rank + rope), dtype=torch.float32, device=CPU)
    batch = plan_attention(np.array([0, new, new + 1]), lengths, tables[None], None, shape)
    queries = draw(new + 1, heads, nope + rope)
    slots = np.concatenate([np.arange(context, context + new), tables[1, 2:3] * block_size + 3])
    rows = cache.flatten(0, 2)[torch.from_numpy(slots)]
    found = []
    for expands in (False, True):
        monkeypatch.setattr(kernel, "expands", lambda _queries, _up, now=expands: now)
        found.append(kernel.latent_attention(queries, rows, cache, up, batch, 0.3))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    expected = []
    for token in range(new + 1):
        table, length = (0, context + token + 1) if token < new else (1, 20)
        seen = cache[tables[table]].flatten(0, 2)[:length]
        made = torch.einsum("tr,hwr->thw", seen[:, :rank], up)
        keys = torch.cat([made[..., :nope], seen[:, None, rank:].expand(-1, heads, -1)], dim=2)
        weights = (torch.einsum("hd,thd->ht", queries[token], keys) * 0.3).softmax(1)
        expected.append(torch.einsum("ht,thv->hv", weights, made[..., nope:]))
    torch.testing.assert_close(found[0], torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_the_cheaper_way_is_taken() -> None:
    """DeepSeek V3: 512 * 256 products make a row's key and value, each pair of query and row then saves 768."""
    up = torch.empty((128, 256, 512), device="meta")
    assert [kernel.expands(count, up) for count in (1, 170, 171, 512)] == [False, False, True, True]


def test_a_checkpoint_in_blocks_of_8_bits_gives_the_tokens_of_what_it_stands_for(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = make_model(tmp_path / "model", "deepseek_v3", seed=3, **QUANTIZABLE)
    quantized, plain = make_checkpoints(model, "fp8, blocks", tmp_path)
    prompts = [make_prompt(length) for length in (5, 40)]
    engine = Engine(quantized, CoreLimits(max_num_seqs=8, max_num_batched_tokens=24, enable_prefix_caching=False))
    assert engine.generate(prompts) == [greedy_reference(plain, prompt, NUM_TOKENS) for prompt in prompts]
    worker = engine.worker
    assert isinstance(worker, TorchWorker)
    assert isinstance(worker._model, Decoder)
    layer = worker._model._weights.layers[1]
    assert layer.latent is not None
    for linear in (layer.qkv, layer.o, layer.latent.query_up):
        assert isinstance(linear, QuantizedLinear)
        assert linear._weight.kind == "fp8"


def test_layers_that_predict_further_tokens_are_left_out(models: Models, tmp_path: Path) -> None:
    tensors = load_file(models("deepseek_v3") / "model.safetensors")
    layer = {name: tensor for name, tensor in tensors.items() if "layers.1." in name}
    further = {name.replace("layers.1.", "layers.2."): tensor.clone() for name, tensor in layer.items()}
    further["model.layers.2.eh_proj.weight"] = torch.ones(64, 128)
    save_file({**tensors, **further}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((models("deepseek_v3") / "config.json").read_text())
    prompt, limits = make_prompt(20), CoreLimits(max_num_seqs=1, max_num_batched_tokens=64)
    assert Engine(tmp_path, limits).generate([prompt]) == Engine(models("deepseek_v3"), limits).generate([prompt])


def test_rounded_weights_and_an_8_bit_cache_change_log_probabilities_only_a_little(models: Models) -> None:
    directory, prompts = models("deepseek_v3 with wide latents"), [make_prompt(40)]
    limits = CoreLimits(max_num_seqs=1, max_num_batched_tokens=64)
    (exact,) = Engine(directory, limits).log_probabilities(prompts, 1)
    for options, most in (({"quantization": "ifq"}, 0.3), ({"kv_cache_dtype": "fp8"}, 0.6)):
        (found,) = Engine(directory, limits, **options).log_probabilities(prompts, 1)
        assert 0 < np.abs(found - exact).mean() < most


def test_a_prompt_of_another_engine_is_continued_with_the_same_tokens(models: Models) -> None:
    directory = models("deepseek_v2")
    with (
        started(directory) as alone,
        started(directory, "prefill") as prefill,
        started(directory, "decode", enable_prefix_caching=False) as decode,
    ):
        alone.add("r", None)
        expected = run(alone, until=(alone, "r"))
        decode.add("r", prefill.compute_prompt("t"))
        assert run(prefill, decode, until=(decode, "r")) == expected
        assert decode.engine.counters().kv_loaded_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_adapters_are_refused(backend: str, models: Models) -> None:
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "cpu_backend": backend}
    with pytest.raises(SettingsError, match="--enable-lora: this model has latent attention"):
        load_worker(settings(models("youtu"), **options))
