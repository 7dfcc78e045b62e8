"""`antiphon quantize`: what it writes, in all backends, against transformers with the weights that it stands for."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from antiphon.cli import main
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.quantizer import algorithms
from antiphon.services.vision.encoder import VisionEncoder
from antiphon.shared.settings.quantization import SMOOTHQUANT_FILE
from tests.draft_models import make_draft_model
from tests.model.harness import NUM_TOKENS, Engine, make_prompt
from tests.model_variants import MORE_VARIANTS
from tests.models import greedy_reference, make_model
from tests.quantized.written import all_tensors, fused, write_plain
from tests.support.slow import slow_but
from tests.vision_models import make_vision_model

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
EXACT = ("weight_only_int8", "awq", "gptq", "gptq --desc-act")
ALGORITHMS = ("weight_only_int8", "awq", "gptq", "smooth_quant")
VARIANTS = {
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "gpt_neox": (),
    "gemma2": (),
    "apertus": (),
    "ministral3": (),
    "lfm2": (),
}
"""Families with transposed matrices, grouped rows and shared inputs, norms that add one, numbers of an activation,
queries that grow, convolutions in place of attention → transposed modules.
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return make_model(directory, "qwen2", seed=3, dtype="float32", hidden_size=64, intermediate_size=192)


def quantize(model: Path, output: Path, algorithm: str, *words: str, tp: int = 1) -> int:
    flags = ("-i", str(model), "-o", str(output), "-quant_type", *algorithm.split(), "-tp", str(tp), "-t", "bf16")
    return main(["quantize", *flags, *words])


def tokens(directory: Path, backend: str, **overrides: Any) -> list[list[int]]:
    prompts = [make_prompt(length) for length in (5, 40)]
    engine = Engine(
        directory,
        CoreLimits(max_num_seqs=8, max_num_batched_tokens=24, enable_prefix_caching=False),
        backend,
        dtype="float32",
        **overrides,
    )
    return engine.generate(prompts)


def reference(directory: Path) -> list[list[int]]:
    return [greedy_reference(directory, make_prompt(length), NUM_TOKENS) for length in (5, 40)]


@pytest.mark.spec("S-QNT-001", "S-QNT-002", "S-QNT-003", "S-QNT-005", "S-QNT-011", "S-QNT-012", "S-QNT-013")
@pytest.mark.parametrize("algorithm", EXACT)
def test_what_it_writes_gives_the_tokens_of_the_weights_that_it_stands_for(
    algorithm: str, model: Path, tmp_path: Path
) -> None:
    quantized = tmp_path / "quantized"
    assert quantize(model, quantized, algorithm) == 0
    expected = reference(write_plain(quantized, tmp_path / "plain"))
    for backend in ("torch", "native"):
        assert tokens(quantized, backend) == expected
    config = json.loads((quantized / "config.json").read_text())
    methods = {"weight_only_int8": "compressed-tensors", "awq": "awq", "gptq": "gptq", "gptq --desc-act": "gptq"}
    assert config["quantization_config"]["quant_method"] == methods[algorithm]
    assert config["quantization_config"].get("desc_act", False) == algorithm.endswith("--desc-act")
    assert "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))
    assert all_tensors(quantized)["model.norm.weight"].dtype == torch.bfloat16
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (quantized / name).is_file() == (model / name).is_file()


@pytest.mark.parametrize(
    ("family", "algorithm"),
    # Those that move scales into other modules, for every layout; those that round matrices where they are, for one.
    slow_but(
        [("lfm2", "awq"), ("gpt_neox", "smooth_quant"), ("gpt2", "gptq"), ("gpt_neox", "weight_only_int8")],
        [
            *product(VARIANTS, ("awq", "smooth_quant")),
            *(("gpt2", "gptq"), ("gpt_neox", "weight_only_int8"), ("lfm2", "gptq")),
        ],
    ),
)
def test_families_with_other_layouts(family: str, algorithm: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"n_inner": 192} if family == "gpt2" else {"intermediate_size": 192}
    head: dict[str, Any] = {"head_dim": 16}
    if family in ("gpt2", "gpt_neox"):
        head = {}
    elif family == "lfm2":
        head = {"conv_bias": True, "block_auto_adjust_ff_dim": False}
    model = make_model(tmp_path / "model", family, seed=5, dtype="float32", hidden_size=64, **sizes, **head)
    quantized = tmp_path / "quantized"
    assert quantize(model, quantized, algorithm) == 0
    expected = reference(write_plain(quantized, tmp_path / "plain", VARIANTS[family]))
    produced = tokens(quantized, "native")
    if algorithm in EXACT:
        assert produced == expected
    else:
        # Rows of 8 bits change logits by about a hundredth, so the first token is compared.
        assert produced[0][0] == expected[0][0]


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_in_8_bits_is_read_as_what_it_stands_for(family: str, tied: bool, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"n_inner": 192} if family == "gpt2" else {"intermediate_size": 192}
    model = make_model(
        tmp_path / "model", family, seed=5, dtype="float32", hidden_size=64, tie_word_embeddings=tied, **sizes
    )
    quantized = tmp_path / "quantized"
    assert quantize(model, quantized, "weight_only_int8", "--round-embedding") == 0
    embedding = "transformer.wte" if family == "gpt2" else "model.embed_tokens"
    assert {f"{embedding}.weight_packed", f"{embedding}.weight_scale"} <= set(all_tensors(quantized))
    config = json.loads((quantized / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["targets"] == ["Linear", "Embedding"]
    others = ["lm_head", "transformer.wpe"] if family == "gpt2" else ["lm_head"]
    assert config["ignore"] == others, "the head and positions keep their type"
    expected = reference(write_plain(quantized, tmp_path / "plain", VARIANTS.get(family, ())))
    for backend in ("torch", "native"):
        assert tokens(quantized, backend) == expected


def test_an_embedding_in_8_bits_is_for_weight_only_int8(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--round-embedding", "--no-round-embedding"):
        assert quantize(model, tmp_path / option, "awq", option) == 0
        assert "--round-embedding has no effect with -quant_type awq" in capsys.readouterr().err
        assert all_tensors(tmp_path / option)["model.embed_tokens.weight"].dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(("width", "in_8_bits"), [(192, True), (2048, False)])
def test_an_embedding_gets_8_bits_if_it_is_more_than_a_tenth_of_the_weights_unless_asked_otherwise(
    width: int, in_8_bits: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": width}
    model = make_model(tmp_path / "model", "qwen2", seed=5, dtype="float32", tie_word_embeddings=True, **sizes)
    for options, expected in ((), in_8_bits), (("--round-embedding",), True), (("--no-round-embedding",), False):
        target = tmp_path / "-".join(("out", *options))
        assert quantize(model, target, "weight_only_int8", *options) == 0
        assert ("model.embed_tokens.weight_packed" in all_tensors(target)) == expected
        assert ("--no-round-embedding keeps its type" in capsys.readouterr().err) == (expected and not options)


EXPERTS = {
    "mixtral": {"intermediate_size": 96},
    "qwen2_moe": {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"moe_intermediate_size": 64, "mlp_only_layers": [1], "intermediate_size": 192},
    "glm4_moe": {"moe_intermediate_size": 64, "intermediate_size": 192},
    "olmoe": {"intermediate_size": 64},
    "lfm2_moe": {"moe_intermediate_size": 64, "intermediate_size": 192},
}


@pytest.mark.parametrize(
    ("family", "algorithm"),
    slow_but(
        [("qwen3_moe", "awq"), ("glm4_moe", "gptq"), ("qwen3_moe", "weight_only_int8")],
        [
            *product(EXPERTS, ("awq", "smooth_quant")),
            *(("mixtral", "gptq"), ("glm4_moe", "gptq"), ("qwen2_moe", "gptq --desc-act")),
            ("qwen3_moe", "weight_only_int8"),
        ],
    ),
)
def test_models_with_experts(family: str, algorithm: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", family, seed=5, dtype="float32", **EXPERTS[family])
    quantized = tmp_path / "quantized"
    assert quantize(model, quantized, algorithm) == 0
    tensors = all_tensors(quantized)
    plain = {name for name, tensor in tensors.items() if name.endswith(".weight") and tensor.dtype != torch.int8}
    assert not any("proj" in name or "experts." in name for name in plain)
    assert all(
        tensors[name].dtype == torch.float32 for name in tensors if name.endswith(("correction_bias", "expert_bias"))
    )
    expected = reference(write_plain(quantized, tmp_path / "plain"))
    for backend in ("torch", "native"):
        produced = tokens(quantized, backend)
        if algorithm in EXACT:
            assert produced == expected
        else:
            # Rows of 8 bits change logits by about a hundredth, so the first token is compared.
            assert produced[0][0] == expected[0][0]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gpt_oss", "gpt_oss have all experts of a layer in one tensor"),
        ("granitemoe", "granite_moe have all experts of a layer in one tensor"),
        ("gemma3n_text", "several residual streams"),
    ],
)
def test_models_without_a_layout_of_quantized_weights_are_refused(
    family: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / family, family, dtype="float32")
    assert quantize(model, tmp_path / "quantized", "awq") == 2
    assert reason in capsys.readouterr().err


def test_an_expert_that_no_token_chooses_is_rounded_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "model", "mixtral", seed=5, dtype="float32", **EXPERTS["mixtral"])
    tensors = load_file(model / "model.safetensors")
    router = tensors["model.layers.0.block_sparse_moe.gate.weight"]
    router[3:] = -router[:2]  # of opposite scores at most one is among the two highest
    router[2] = 0
    tensors["model.embed_tokens.weight"][:] = tensors["model.embed_tokens.weight"][:1]  # all tokens are the same one
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    for algorithm in ("awq", "gptq"):
        quantized = tmp_path / algorithm
        assert quantize(model, quantized, algorithm) == 0
        said = capsys.readouterr().err
        assert "experts of all layers read fewer than 256 calibration tokens" in said
        assert tokens(quantized, "torch") == reference(write_plain(quantized, tmp_path / f"{algorithm}-plain"))


LATENT: dict[str, Any] = {"intermediate_size": 192, "kv_lora_rank": 32, "v_head_dim": 16}
ROUTED: dict[str, Any] = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
NARROW: dict[str, Any] = {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 96}
MIXERS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"intermediate_size": 192, "linear_value_head_dim": 16},
    "qwen3_5 with experts": {**ROUTED, "linear_value_head_dim": 16},
    "qwen3_next": ROUTED,
    "gemma4": {"intermediate_size": 192, "global_head_dim": 32},
    "gemma4 with layers that share keys": {"intermediate_size": 192},
    "gemma4 with experts": {"intermediate_size": 192, "global_head_dim": 32, "moe_intermediate_size": 64},
    "llama4": {"intermediate_size": 64, "intermediate_size_mlp": 192},
    "laguna": {**ROUTED, "intermediate_size": 192},
    "granite with state spaces": {"shared_intermediate_size": 96},
    "bamba": {"intermediate_size": 192},
    "falcon_h1 with norms": {"intermediate_size": 192},
    "nemotron_h with experts": {**NARROW, "intermediate_size": 192},
    "nemotron_h with narrow experts": {**NARROW, "moe_latent_size": 32},
    "mamba2": {},
    "mamba": {"intermediate_size": 128},
    "jamba": {"intermediate_size": 192},
    "kimi_linear with wide heads": {**LATENT, "linear_head_dim": 32, "q_lora_rank": 32, "moe_intermediate_size": 64},
    "deepseek_v2 lite": LATENT,
    "deepseek_v3": {**LATENT, "q_lora_rank": 32},
    "youtu": {**LATENT, "q_lora_rank": 32},
    "afmoe": {"intermediate_size": 192, "moe_intermediate_size": 64},
    "lfm3": {"intermediate_size": 192},
}
"""Models with recurrent states, latents, gates or layers of different heads, with widths that divide into groups."""
JOINED: dict[str, Callable[..., Any]] = {
    "gemma4 with experts": partial(fused, in_rows=True),
    "llama4": partial(fused, in_rows=False),
}
"""Models whose plain checkpoints have all experts of a layer in one tensor, and how they join them."""
MOST_CHANGED = {"weight_only_int8": 0.15, "smooth_quant": 0.15, "awq": 0.45, "gptq": 0.45, "gptq --desc-act": 0.45}
"""What a layer's output may change by; factors that one matrix lacks change it by about as much as it is."""


@pytest.mark.parametrize(
    ("name", "algorithm"),
    slow_but(
        [("qwen3_5", "gptq"), ("mamba", "awq"), ("deepseek_v3", "smooth_quant"), ("youtu", "weight_only_int8")],
        [
            *product(MIXERS, ("awq",)),
            *product(
                (
                    *("qwen3_5", "qwen3_next", "gemma4", "granite with state spaces", "falcon_h1 with norms", "mamba2"),
                    *("mamba", "nemotron_h with experts", "kimi_linear with wide heads", "deepseek_v3", "afmoe"),
                    *JOINED,
                ),
                ("smooth_quant",),
            ),
            *product(
                ("qwen3_5", "gemma4 with layers that share keys", "bamba", "mamba", "nemotron_h with narrow experts"),
                ("gptq",),
            ),
            *product(("qwen3_next", "kimi_linear with wide heads", "deepseek_v3", *JOINED), ("gptq --desc-act",)),
            *product(("qwen3_5 with experts", "falcon_h1 with norms", "youtu"), ("weight_only_int8",)),
        ],
    ),
)
def test_models_with_states_latents_and_heads_of_different_kinds(name: str, algorithm: str, tmp_path: Path) -> None:
    family, fields = MORE_VARIANTS[name]
    model = make_model(tmp_path / "model", family, seed=5, dtype="float32", **{**fields, **MIXERS[name]})
    quantized = tmp_path / "quantized"
    assert quantize(model, quantized, algorithm) == 0
    changed = json.loads((quantized / "antiphon_quantization.json").read_text())["relative_output_errors"]
    assert max(changed) < MOST_CHANGED[algorithm]
    tensors = all_tensors(quantized)
    assert plain_modules(quantized) == {
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.dtype != torch.int8 and tensor.dim() == 2 and "embed" not in name
    } | ({"lm_head"} if "lm_head.weight" not in tensors else set())
    exact = (".A_log", ".dt_bias", ".D", "dt_proj.bias", "correction_bias", "expert_bias")
    assert all(tensors[name].dtype == torch.float32 for name in tensors if name.endswith(exact))
    expected = reference(write_plain(quantized, tmp_path / "plain", fuse=JOINED.get(name, dict)))
    produced = {backend: tokens(quantized, backend) for backend in ("torch", "native")}
    if algorithm in EXACT:
        assert produced == dict.fromkeys(produced, expected)
    else:
        # Rows of 8 bits change logits by about a hundredth, so the first token is compared.
        assert {row[0][0] for row in produced.values()} == {expected[0][0]}


@pytest.mark.parametrize(
    "name",
    slow_but(["deepseek_v3"], ["qwen3_5", "gemma4 with layers that share keys", "bamba", "mamba", "deepseek_v3"]),
)
def test_statistics_of_inputs_lower_the_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, fields = MORE_VARIANTS[name]
    model = make_model(tmp_path / "model", family, seed=5, dtype="float32", **{**fields, **MIXERS[name]})
    measured: list[float] = []
    for directory in (tmp_path / "with", tmp_path / "without"):
        assert quantize(model, directory, "gptq") == 0
        record = json.loads((directory / "antiphon_quantization.json").read_text())
        measured.append(sum(record["relative_output_errors"]))
        # Inputs that are alike: nothing is compensated, as when values are rounded to the nearest ones.
        monkeypatch.setattr(algorithms, "_products", lambda site, sites, width: torch.eye(width))
    assert measured[0] < measured[1]


@pytest.mark.parametrize(("make", "family"), [(make_vision_model, "qwen3_5"), (make_draft_model, "qwen3_5_text")])
def test_encoders_and_layers_that_draft_are_written_as_they_are(make: Any, family: str, tmp_path: Path) -> None:
    model, quantized = make(tmp_path / "model", family, seed=5), tmp_path / "quantized"
    assert quantize(model, quantized, "weight_only_int8") == 0
    written = all_tensors(quantized)
    others = {
        name: tensor
        for name, tensor in load_file(model / "model.safetensors").items()
        if name.startswith(("model.visual.", "mtp."))
    }
    assert others
    assert all(torch.equal(written[name], tensor.to(torch.bfloat16)) for name, tensor in others.items())
    modules = {name.removesuffix(".weight") for name, t in others.items() if name.endswith(".weight") and t.dim() == 2}
    assert modules <= plain_modules(quantized)
    if make is make_vision_model:
        first, second = (VisionEncoder(directory, {}, torch.float32, "cpu") for directory in (model, quantized))
        assert first.token_id == second.token_id, "both have all weights"
    drafts = make is make_draft_model
    assert tokens(quantized, "torch", use_mtp=drafts) == tokens(quantized, "native", use_mtp=drafts)


def plain_modules(quantized: Path) -> set[str]:
    """The modules that the config of a checkpoint says are not quantized."""
    settings = json.loads((quantized / "config.json").read_text())["quantization_config"]
    if settings["quant_method"] == "gptq":
        dynamic = settings.get("dynamic", {})
        named = {rule.removeprefix("-:^").removesuffix("$").replace("\\", "") for rule in dynamic}
        return named | {"lm_head"}
    return set(settings["ignore"] if "ignore" in settings else settings["modules_to_not_convert"])


@pytest.mark.spec("S-QNT-014", "S-QNT-018", "S-QNT-023")
def test_smooth_quant_also_writes_one_file_that_needs_no_other(model: Path, tmp_path: Path) -> None:
    quantized = tmp_path / "quantized"
    assert quantize(model, quantized, "smooth_quant", "-sq", "0.5") == 0
    expected = all_tensors(quantized)
    with safe_open(quantized / SMOOTHQUANT_FILE, "pt") as file:
        assert set(file.keys()) == set(expected)
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in expected.items())
    plain = reference(write_plain(quantized, tmp_path / "plain"))
    for path in quantized.glob("model*.safetensors"):
        path.unlink()
    for backend in ("torch", "native"):
        for asked in ("smoothquant", "smooth_quant", ""):
            produced = tokens(quantized, backend, quantization=asked)
            assert [row[0] for row in produced] == [row[0] for row in plain]
    group = json.loads((quantized / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"]["strategy"] == "token"
    assert group["input_activations"]["dynamic"]
    assert json.loads((quantized / "antiphon_quantization.json").read_text())["sq"] == 0.5


@pytest.mark.spec("S-QNT-006")
def test_the_strength_of_smoothing_has_a_default_by_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from antiphon.services.engine.quantizer.job import default_strength

    assert quantize(model, tmp_path / "default", "smooth_quant") == 0
    assert "-sq: 0.8, the default" in capsys.readouterr().err
    assert quantize(model, tmp_path / "given", "smooth_quant", "-sq", "0.8") == 0
    assert quantize(model, tmp_path / "other", "smooth_quant", "-sq", "0.2") == 0
    default, given, other = (all_tensors(tmp_path / name) for name in ("default", "given", "other"))
    name = "model.layers.0.input_layernorm.weight"
    assert torch.equal(default[name], given[name])
    assert not torch.equal(default[name], other[name])
    assert (default_strength("llama", 32), default_strength("glm", 70), default_strength("glm", 40)) == (0.8, 0.75, 0.8)
    for value in ("1.5", "-0.1"):
        assert quantize(model, tmp_path / "bad", "smooth_quant", f"-sq={value}") == 2
        assert "-sq: " in capsys.readouterr().err
    for algorithm in ("gptq", "awq"):
        assert quantize(model, tmp_path / algorithm, algorithm, "-sq", "0.5") == 0
        assert f"-sq has no effect with -quant_type {algorithm}" in capsys.readouterr().err


def test_plain_weights_of_a_quantized_model_may_be_float16(model: Path, tmp_path: Path) -> None:
    flags = ("-i", str(model), "-o", str(tmp_path / "out"), "-quant_type", "smooth_quant", "-tp", "2", "-t", "fp16")
    assert main(["quantize", *flags, "-sq", "0.5"]) == 0
    tensors = all_tensors(tmp_path / "out")
    assert tensors["model.norm.weight"].dtype is torch.float16
    assert tokens(tmp_path / "out", "torch") == tokens(tmp_path / "out", "native")


def test_activation_order_sorts_the_inputs_of_matrices_that_read_the_same_alike(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192}
    wide = make_model(tmp_path / "wide", "qwen2", seed=3, dtype="float32", **sizes)
    assert quantize(wide, tmp_path / "out", "gptq --desc-act") == 0
    tensors = all_tensors(tmp_path / "out")
    for parts in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        first, *others = (tensors[f"model.layers.0.{part}.g_idx"] for part in parts)
        assert first.tolist() != sorted(first.tolist())
        assert all(torch.equal(first, other) for other in others)
    assert json.loads((tmp_path / "out" / "antiphon_quantization.json").read_text())["desc_act"]
    assert quantize(model, tmp_path / "warned", "awq --desc-act") == 0
    assert "--desc-act has no effect with -quant_type awq" in capsys.readouterr().err


@pytest.mark.spec("S-QNT-007")
def test_token_ids_replace_the_text(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = tmp_path / "smooth_tokenids.txt"
    rng = np.random.default_rng(1)
    ids.write_text(
        "\n".join(mark.join(map(str, rng.integers(3, 300, 40))) for mark in (",", " ", ", ") for _ in range(20))
    )
    name = "model.layers.0.mlp.up_proj.weight"
    found = []
    for index, words in enumerate(((), ("-token", str(ids)), ("--tokenids_path", str(ids)))):
        assert quantize(model, tmp_path / str(index), "smooth_quant", *words) == 0
        found.append(all_tensors(tmp_path / str(index))[name])
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])
    record = json.loads((tmp_path / "1" / "antiphon_quantization.json").read_text())
    assert record["calibration_tokens"] == 60 * 40
    for content, said in (("1,2\n3 331 4", "line 2"), ("one", "'one'"), ("\n", "no token ids")):
        ids.write_text(content)
        assert quantize(model, tmp_path / "bad", "smooth_quant", "-token", str(ids)) == 2
        assert said in capsys.readouterr().err
    assert quantize(model, tmp_path / "missing", "smooth_quant", "-token", str(tmp_path / "none.txt")) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert quantize(model, tmp_path / "int8", "weight_only_int8", "-token", str(ids)) == 0
    assert "-token has no effect with -quant_type weight_only_int8" in capsys.readouterr().err


@pytest.mark.spec("S-QNT-008")
def test_multi_query_mode_confirms_what_the_model_is(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(model, tmp_path / "shared", "smooth_quant", "--multi-query-mode") == 0
    own = make_model(tmp_path / "own", "qwen2", seed=3, dtype="float32", num_key_value_heads=4)
    assert quantize(own, tmp_path / "each", "smooth_quant", "--multi-query-mode") == 2
    assert "4 key heads for 4 query heads" in capsys.readouterr().err
    assert quantize(own, tmp_path / "int8", "weight_only_int8", "--multi-query-mode") == 0
    assert "--multi-query-mode has no effect" in capsys.readouterr().err


@pytest.mark.spec("S-QNT-004")
def test_every_matrix_must_divide_among_the_devices(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(model, tmp_path / "two", "gptq", tp=2) == 0
    assert json.loads((tmp_path / "two" / "antiphon_quantization.json").read_text())["tp"] == 2
    assert quantize(model, tmp_path / "four", "weight_only_int8", tp=4) == 2
    assert "model.layers.0.self_attn.q_proj.weight has 2 key heads" in capsys.readouterr().err
    recurrent = make_model(tmp_path / "recurrent", "lfm2", dtype="float32", hidden_size=84, num_attention_heads=6)
    assert quantize(recurrent, tmp_path / "eight", "weight_only_int8", tp=8) == 2
    assert "model.layers.0.conv.in_proj.weight has parts of 84 outputs" in capsys.readouterr().err
    experts = make_model(tmp_path / "keys", "kimi_linear", dtype="float32", kv_lora_rank=32)
    assert quantize(experts, tmp_path / "linear", "weight_only_int8", tp=2) == 2
    assert "model.layers.0.self_attn.q_proj.weight has 1 groups of heads" in capsys.readouterr().err
    latents = make_model(tmp_path / "latents", "youtu", dtype="float32", num_attention_heads=6, num_key_value_heads=6)
    assert quantize(latents, tmp_path / "three", "weight_only_int8", tp=2) == 0
    assert quantize(latents, tmp_path / "six", "weight_only_int8", tp=4) == 2
    assert "model.layers.0.self_attn.q_a_proj.weight has 6 query heads" in capsys.readouterr().err
    odd = make_model(tmp_path / "odd", "qwen2", seed=3, dtype="float32", intermediate_size=176)
    assert quantize(odd, tmp_path / "groups", "awq") == 2
    assert "model.layers.0.mlp.down_proj.weight has 176 inputs" in capsys.readouterr().err


@pytest.mark.spec("S-QNT-001", "S-QNT-002", "S-QNT-003", "S-QNT-004", "S-QNT-005")
@pytest.mark.parametrize("flag", ["-i", "-o", "-quant_type", "-tp", "-t"])
def test_an_option_that_is_missing_or_wrong_is_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = {"-i": "in", "-o": "out", "-quant_type": "awq", "-tp": "1", "-t": "bf16"}
    del words[flag]
    with pytest.raises(SystemExit) as ended:
        main(["quantize", *(word for pair in words.items() for word in pair)])
    assert ended.value.code == 2
    assert f"required: {flag}" in capsys.readouterr().err
    choices = {"-quant_type": "weight_only_int8 smooth_quant awq gptq", "-tp": "1 2 4 8", "-t": "fp16 bf16"}
    if flag in choices:
        with pytest.raises(SystemExit) as ended:
            main(["quantize", *(word for pair in {**words, flag: "3"}.items() for word in pair)])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert all(choice in said for choice in choices[flag].split())
    # No option is taken shortened or joined with its value.
    with pytest.raises(SystemExit) as ended:
        main(["quantize", *(word for pair in words.items() for word in pair), f"{flag}x", "1"])
    assert ended.value.code == 2


def test_directories_that_cannot_be_used_are_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    for directory, output, said in (
        (tmp_path / "none", tmp_path / "a", "is not a directory"),
        (tmp_path, tmp_path.parent / "outside", "no config.json"),
        (model, model, "is the model's directory"),
        (model, full, "is not empty"),
    ):
        assert quantize(directory, output, "weight_only_int8") == 2
        assert said in capsys.readouterr().err
    assert quantize(model, tmp_path / "once", "weight_only_int8") == 0
    assert quantize(tmp_path / "once", tmp_path / "twice", "weight_only_int8") == 2
    assert "quantized already" in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ["gptq", "smooth_quant"])
def test_an_interrupted_run_continues_to_the_same_bytes(
    algorithm: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, halted = tmp_path / "whole", tmp_path / "halted"
    assert quantize(model, whole, algorithm) == 0
    save = __import__("antiphon.services.engine.quantizer.output", fromlist=["Output"]).Output.save

    def until_the_second_layer(self: object, shard: int, tensors: dict[str, torch.Tensor]) -> None:
        if shard == 2:
            raise OSError("No space left on device")
        save(self, shard, tensors)

    with monkeypatch.context() as patch:
        patch.setattr("antiphon.services.engine.quantizer.output.Output.save", until_the_second_layer)
        assert quantize(model, halted, algorithm) == 1
    assert "it continues" in capsys.readouterr().err
    kept = (halted / "model-00002-of-00003.safetensors").stat().st_mtime_ns
    assert quantize(model, halted, "awq") == 2
    assert "other options" in capsys.readouterr().err
    assert quantize(model, halted, algorithm) == 0
    assert (halted / "model-00002-of-00003.safetensors").stat().st_mtime_ns == kept
    names = sorted(path.name for path in whole.iterdir())
    assert names == sorted(path.name for path in halted.iterdir())
    assert all((whole / name).read_bytes() == (halted / name).read_bytes() for name in names)


def test_numbers_that_the_type_cannot_hold_are_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = tmp_path / "large"
    shutil.copytree(model, large)
    tensors = load_file(large / "model.safetensors")
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, large / "model.safetensors", {"format": "pt"})
    flags = ("-i", str(large), "-o", str(tmp_path / "out"), "-quant_type", "weight_only_int8", "-tp", "1", "-t", "fp16")
    assert main(["quantize", *flags]) == 2
    assert "model.norm.weight has numbers that fp16 cannot hold; use -t bf16" in capsys.readouterr().err
