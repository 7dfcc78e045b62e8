"""GGUF files in all backends against transformers with the weights that the package `gguf` makes of them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.quantization.formats.gguf import Gguf
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.models.model_files import model_directory
from tests.gguf_files import Kind, encoded, write_gguf
from tests.model.harness import NUM_TOKENS, Engine, make_prompt, settings
from tests.models import greedy_reference, make_model
from tests.support.slow import slow_but

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
FOUR_BITS = (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.IQ4_NL)
EIGHT_BITS = (Kind.Q5_0, Kind.Q5_1, Kind.Q5_K, Kind.Q8_0)
"""Kept in 8 bits."""
SHORT_GROUPS = (Kind.Q2_K, Kind.Q3_K, Kind.Q6_K)
"""Kept in 8 bits in groups of 16."""
EXACT = (Kind.Q4_0, Kind.IQ4_NL, Kind.Q5_0, Kind.Q8_0, Kind.Q3_K, Kind.Q6_K)
"""Types without a smallest number."""
OTHERS = (Kind.TQ2_0,)
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
"""Rows are whole blocks of 256."""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted files lie in the home, compiled code in the real one."""
    monkeypatch.setattr("antiphon.shared.models.gguf_model.directory._CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("wide"), "llama", seed=5, **WIDE)


def test_the_format_can_be_asked_for(wide: Path, tmp_path: Path) -> None:
    write_gguf(wide, tmp_path / "m.gguf", Kind.Q4_0)

    def load(model: Path, load_format: str) -> None:
        load_worker(settings(model, load_format=load_format, cpu_backend="torch")).close()

    load(tmp_path / "m.gguf", "gguf")
    with pytest.raises(SettingsError, match=r"--load-format=safetensors: .* has no file of that kind"):
        load(tmp_path / "m.gguf", "safetensors")
    with pytest.raises(SettingsError, match=r"--load-format=gguf: .* has no file of that kind"):
        load(wide, "gguf")


def check(file: Path, plain: Path, backend: str) -> None:
    directory = model_directory(EngineSettings(model=str(file)))
    prompts = [make_prompt(length) for length in (5, 40)]
    engine = Engine(
        directory,
        CoreLimits(max_num_seqs=8, max_num_batched_tokens=24, enable_prefix_caching=False),
        backend,
        dtype="float32",
    )
    assert engine.generate(prompts) == [greedy_reference(plain, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize(
    "kind", [*FOUR_BITS, *EIGHT_BITS, *SHORT_GROUPS, *OTHERS, Kind.F32, Kind.F16, Kind.BF16], ids=lambda kind: kind.name
)
def test_a_type_gives_the_tokens_of_the_weights_that_it_stands_for(
    kind: Kind, backend: str, wide: Path, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    plain = write_gguf(wide, file, kind)
    check(file, plain, backend)


FAMILIES = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama, llama3 positions": {
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama, linear positions": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    "llama, yarn positions": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
        }
    },
    "phi3, long positions": {
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 128,
            "short_factor": [1.0, 1.1, 1.2, 1.4, 1.5, 1.6, 1.7, 1.9],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
        },
    },
    "llama tied": {"tie_word_embeddings": True},
    "mistral with a window": {"sliding_window": 23},
    "mixtral": {},
    "qwen2": {},
    "qwen2 tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen2_moe": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "phi3": {},
    "phi3 with a window": {"sliding_window": 23},
    "arcee": {},
    "granite": {},
    "ministral3": {},
    "olmoe": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 24},
    "gemma3_text": {"query_pre_attn_scalar": 24, "num_hidden_layers": 7},
    "lfm2": {},
    "lfm2_moe": {"tie_word_embeddings": True},
    "qwen3_5_text": {"linear_value_head_dim": 32},
    "qwen3_5_text with as many key heads": {"linear_num_value_heads": 2},
    "qwen3_5_moe_text": {"tie_word_embeddings": True},
    "qwen3_next": {},
    "gemma3n_text": {
        "intermediate_size": [192, 192, 224, 192],
        "hidden_size_per_layer_input": 32,
        "laurel_rank": 32,
        "tie_word_embeddings": True,
    },
    "gemma4_text": {},
    "gemma4_text with layers that share keys": {
        "num_hidden_layers": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
        "attention_k_eq_v": False,
        "num_key_value_heads": 1,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 331,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": True,
        "global_head_dim": 32,
    },
    "gemma4_text with experts": {
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
    "mamba": {"intermediate_size": 128},
    "falcon_mamba": {"intermediate_size": 128, "tie_word_embeddings": False},
    "mamba2": {},
    "falcon_h1": {},
    "falcon_h1 with norms": {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "jamba": {},
    "jamba without experts": {"num_experts": 1, "attn_layer_period": 4},
    "llama4_text": {
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "no_rope_layers": [1, 1, 1, 0],
        "intermediate_size": 64,
    },
    "kimi_linear": {"num_experts": 8, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
    "granitemoehybrid": {},
    "granitemoehybrid with experts": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "position_embedding_type": "rope",
        "mamba_conv_bias": False,
    },
    "nemotron_h": {},
    "nemotron_h with experts": {
        "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba", "attention"],
        "moe_latent_size": 32,
        "n_group": 3,
        "topk_group": 2,
    },
}


@pytest.mark.parametrize("backend", slow_but(["native"], ["torch", "native"]))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_tokens_of_the_model_that_was_converted(family: str, backend: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "source", re.split("[ ,]", family)[0], seed=7, **FAMILIES[family])
    plain = write_gguf(model, tmp_path / "model.gguf", Kind.Q4_0)
    check(tmp_path / "model.gguf", plain, backend)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("form", ["as_older", "fused"])
def test_projections_and_experts_may_be_joined_in_other_ways(form: str, backend: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "source", "qwen3_next", seed=7)
    forms = {"as_older": form == "as_older", "fused": form == "fused"}
    plain = write_gguf(model, tmp_path / "model.gguf", Kind.Q4_0, None, **forms)
    check(tmp_path / "model.gguf", plain, backend)


def test_a_layer_that_predicts_further_tokens_is_not_one_of_the_others(tmp_path: Path) -> None:
    model = make_model(tmp_path / "source", "qwen3_5_text", seed=7)

    def one_more(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(5)
        writer.add_nextn_predict_layers(1)
        writer.add_array("qwen35.attention.recurrent_layers", [True, False, False, True, False])
        for name, shape in {"attn_norm": (64,), "ffn_up": (176, 64), "nextn.eh_proj": (64, 128)}.items():
            writer.add_tensor(f"blk.4.{name}.weight", np.ones(shape, dtype=np.float32))

    plain = write_gguf(model, tmp_path / "model.gguf", Kind.Q4_0, one_more)
    check(tmp_path / "model.gguf", plain, "torch")


def test_matrices_of_several_types_are_joined(wide: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in a file of the mixture Q4_K_M: values have another type than queries and keys."""
    kinds = {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "token_embd": Kind.Q6_K, "output": Kind.Q6_K}
    plain = write_gguf(
        wide, tmp_path / "m.gguf", lambda name: next((k for n, k in kinds.items() if f"{n}.w" in name), Kind.Q4_K)
    )
    for backend in ("torch", "native"):
        check(tmp_path / "m.gguf", plain, backend)
    assert "became" not in caplog.text  # queries, keys and values are one matrix, then in 8 bits


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_all_experts_of_a_layer_are_read_from_one_tensor(family: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
    }
    model = make_model(tmp_path / "source", family, seed=7, **sizes)
    plain = write_gguf(model, tmp_path / "m.gguf", lambda name: Kind.Q6_K if "ffn_down" in name else Kind.Q4_K)
    for backend in ("torch", "native"):
        check(tmp_path / "m.gguf", plain, backend)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K, Kind.F16, Kind.TQ2_0], ids=lambda kind: kind.name)
def test_columns_change_places_in_blocks_of_several_heads(
    kind: Kind, backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The value heads of linear attention are 64 wide, and a block has 256 numbers."""
    sizes: dict[str, Any] = {**WIDE, "layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 64}
    model = make_model(tmp_path / "source", "qwen3_5_text", seed=7, **sizes)
    plain = write_gguf(model, tmp_path / "m.gguf", kind)
    check(tmp_path / "m.gguf", plain, backend)
    assert kind == Kind.TQ2_0 or "became" not in caplog.text


@pytest.mark.parametrize("kind", [*FOUR_BITS, *EIGHT_BITS, *SHORT_GROUPS], ids=lambda kind: kind.name)
def test_types_in_groups_stay_quantized_and_are_exact(kind: Kind) -> None:
    array = np.random.default_rng(3).normal(size=(6, 512)).astype(np.float32)
    array[2, :32] = 0.75  # a group of one number has no scale
    stored, _, meaning = encoded(array, kind)
    weight = Gguf().weight({kind.name: torch.from_numpy(stored)}, (6, 512))
    assert isinstance(weight, QuantizedWeight)
    assert weight.kind == ("int4" if kind in FOUR_BITS else "int8")
    assert weight.group_size == (16 if kind in SHORT_GROUPS else 32)
    tolerance = 0 if kind in EXACT else 2e-6
    torch.testing.assert_close(weight.dequantized(), torch.from_numpy(meaning), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.name)
def test_other_types_become_what_the_package_makes_of_them(kind: Kind) -> None:
    array = np.random.default_rng(3).normal(size=(6, 512)).astype(np.float32)
    stored, _, meaning = encoded(array, kind)
    weight = Gguf().weight({kind.name: torch.from_numpy(stored)}, (6, 512))
    assert isinstance(weight, torch.Tensor)
    assert torch.equal(weight, torch.from_numpy(meaning))


def test_blocks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 100 numbers are not blocks of 32"):
        Gguf().weight({"Q4_0": torch.zeros(4, 54, dtype=torch.uint8)}, (4, 100))
    with pytest.raises(ValueError, match=r"Q4_0 blocks has shape \(4, 54\) instead of \(4, 36\)"):
        Gguf().weight({"Q4_0": torch.zeros(4, 54, dtype=torch.uint8)}, (4, 64))
    with pytest.raises(ValueError, match="weights of type Q8_K are not supported"):
        Gguf().weight({"Q8_K": torch.zeros(4, gguf.GGML_QUANT_SIZES[Kind.Q8_K][1], dtype=torch.uint8)}, (4, 256))


def test_a_model_in_parts_is_loaded(wide: Path, tmp_path: Path) -> None:
    def in_parts(writer: gguf.GGUFWriter) -> None:
        writer.split_max_tensors = 8

    plain = write_gguf(wide, tmp_path / "m.gguf", Kind.Q4_0, in_parts)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 1
    check(parts[0], plain, "torch")


def test_a_tensor_that_does_not_fit_its_model_is_refused_by_name(wide: Path, tmp_path: Path) -> None:
    def changed(name: str) -> Callable[[gguf.GGUFWriter], None]:
        return lambda writer: writer.add_uint32(f"llama.{name}", 3)

    for name, message in (
        ("attention.head_count", "'num_key_value_heads' .* must divide|attn_q has 256 rows, which are not 3 heads"),
        ("block_count", r"lacks model\.layers\.2\."),
    ):
        file = tmp_path / f"{name}.gguf"
        write_gguf(wide, file, Kind.Q4_0, changed(name))
        directory = model_directory(EngineSettings(model=str(file)))
        with pytest.raises(ServiceError, match=message):
            Engine(directory, CoreLimits(max_num_seqs=8, max_num_batched_tokens=24), "torch")
