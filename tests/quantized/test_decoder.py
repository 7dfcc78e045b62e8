"""Small decoders whose matrices are quantized, against transformers with the weights that those stand for.

In float32 nothing is rounded but sums: logits agree as they do for plain weights. The rows of int8_dynamic are rounded
in transformers too, by a hook on its linear layers; a number between two whole ones may go the other way there.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from antiphon.services.engine.backends.cpu.decoder import NativeDecoder
from antiphon.services.engine.backends.cpu.native import NativeError, Step, native_weight
from antiphon.services.engine.models.registry import find_family
from antiphon.services.engine.quantization.choice import WeightForm
from antiphon.services.engine.quantization.rounding import quantize_int4, quantize_int8
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.services.engine.worker.loading.model_files import read_config
from tests.models import make_model
from tests.native.libraries import library
from tests.quantized.harness import KINDS, VARIANTS, WEIGHT_ONLY, one_matrix

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]  # compiles the library for every instruction set at first
BLOCK_SIZE = 16
TOKENS = 41
LINEARS = frozenset({"qkv", "o", "up", "down", "experts.up", "experts.down", "shared.up", "shared.down"})
FAMILIES = ("qwen2", "qwen2_moe")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Of the logits' spread, mean square: sums in another order; activations rounded to bfloat16 in every layer."""


class Decoder:
    """A decoder in the library with room for a few sequences."""

    def __init__(
        self,
        directory: Path,
        kind: str,
        variant: str,
        dtype: torch.dtype,
        threads: int = 2,
        quantized: frozenset[str] = LINEARS,
    ) -> None:
        config = read_config(directory)
        family = find_family(config)
        description = family.describe(config)
        self._vocab_size = description.vocab_size

        def quantize(name: str, weight: Tensor) -> Tensor | QuantizedWeight:
            return KINDS[kind](weight) if name in quantized else weight

        form = WeightForm(name=kind, quantize=quantize)
        self.decoder = NativeDecoder(
            library(variant), description, directory, family.layout(description), dtype, BLOCK_SIZE, threads, form
        )
        self._blocks = -(-TOKENS // BLOCK_SIZE)
        num_bytes = self.decoder.model.block_bytes()
        for layer in range(description.num_layers):
            keys, values = (torch.zeros(2 * self._blocks, num_bytes, dtype=torch.uint8) for _ in range(2))
            self.decoder.set_cache(layer, keys, values)

    def logits(self, *prompts: list[int]) -> Tensor:
        """After every token of all prompts, in one step: [tokens, vocab]."""
        lengths = [len(prompt) for prompt in prompts]
        total = sum(lengths)
        logits = torch.empty(total, self._vocab_size)
        arrays: dict[str, NDArray[np.generic]] = {
            "ids": np.array([token for prompt in prompts for token in prompt], dtype=np.int64),
            "positions": np.concatenate([np.arange(length) for length in lengths]),
            "query_start_loc": np.cumsum([0, *lengths]),
            "block_tables": np.arange(len(prompts) * self._blocks).reshape(len(prompts), -1),
            "logit_tokens": np.arange(total),
            "logit_rows": np.arange(total),
            "logits": logits.numpy(),
            "best": np.empty(total, dtype=np.int64),
            "best_logit": np.empty(total, dtype=np.float32),
            "log_total": np.empty(total, dtype=np.float32),
        }
        self.decoder.model.step(
            Step(
                num_tokens=total,
                num_sequences=len(prompts),
                num_logits=total,
                num_rows=total,
                table_width=self._blocks,
                **{name: array.ctypes.data for name, array in arrays.items()},
            )
        )
        return logits

    def without_logits(self, prompt: list[int]) -> None:
        """A part of a prompt, which no token follows yet."""
        arrays: dict[str, NDArray[np.generic]] = {
            "ids": np.array(prompt, dtype=np.int64),
            "positions": np.arange(len(prompt)),
            "query_start_loc": np.array([0, len(prompt)]),
            "block_tables": np.arange(self._blocks).reshape(1, -1),
        }
        addresses = {name: array.ctypes.data for name, array in arrays.items()}
        step = Step(num_tokens=len(prompt), num_sequences=1, table_width=self._blocks, **addresses)
        self.decoder.model.step(step)

    def free(self) -> None:
        self.decoder.model.free()


def prompt(seed: int, length: int = TOKENS) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, length).tolist()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense one and one with experts, some of them shared."""
    return {
        family: make_model(tmp_path_factory.mktemp(family), family, seed=3, dtype="bfloat16") for family in FAMILIES
    }


def reference(directory: Path, kind: str, scratch: Path) -> Tensor:
    """Logits of transformers with the weights that a kind makes of the model's: [tokens, vocab]."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(directory, scratch, dirs_exist_ok=True)
    weights = load_file(scratch / "model.safetensors")
    for name, weight in weights.items():
        if "proj" in name and name.endswith("weight"):
            weights[name] = KINDS[kind](weight).dequantized()
    save_file(weights, scratch / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32)
    if kind == "int8_dynamic":
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and "proj" in name:
                module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    with torch.inference_mode():
        return model(torch.tensor([prompt(0)])).logits[0]


def rounded(x: Tensor) -> Tensor:
    """Each row as whole numbers of up to 127 times its scale."""
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    return (x / scale).round() * scale


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", WEIGHT_ONLY)
def test_a_decoder_with_quantized_weights_computes_with_what_they_stand_for(
    models: dict[str, Path], tmp_path: Path, family: str, kind: str
) -> None:
    expected = reference(models[family], kind, tmp_path)
    for variant in VARIANTS:
        for dtype in (torch.float32, torch.bfloat16) if family == "qwen2" else (torch.float32,):
            decoder = Decoder(models[family], kind, variant, dtype)
            error = (decoder.logits(prompt(0)) - expected).square().mean().sqrt() / expected.std()
            decoder.free()
            assert error <= TOLERANCE[dtype], (variant, dtype, error)


def test_the_embedding_stays_whole_where_a_tied_head_is_quantized(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    directory = make_model(tmp_path / "tied", "qwen2", seed=3, dtype="bfloat16", tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        hidden = model.model(torch.tensor([prompt(0)])).last_hidden_state[0]
    head = KINDS["int8"](model.lm_head.weight.detach().to(torch.bfloat16)).dequantized()
    expected = hidden @ head.T
    for variant in VARIANTS:
        decoder = Decoder(directory, "int8", variant, torch.float32, quantized=frozenset({"head"}))
        error = (decoder.logits(prompt(0)) - expected).square().mean().sqrt() / expected.std()
        decoder.free()
        assert error <= TOLERANCE[torch.float32], (variant, error)


def test_a_decoder_with_rows_of_8_bits_computes_with_rounded_rows(models: dict[str, Path], tmp_path: Path) -> None:
    expected = reference(models["qwen2"], "int8_dynamic", tmp_path)
    for variant in VARIANTS:
        decoder = Decoder(models["qwen2"], "int8_dynamic", variant, torch.float32)
        error = (decoder.logits(prompt(0)) - expected).abs() / expected.abs().max()
        decoder.free()
        assert error.mean() <= 1e-3, variant
        assert error.max() <= 0.03, variant


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_gets_the_same_logits_whoever_shares_its_step(models: dict[str, Path], kind: str) -> None:
    for variant in VARIANTS:
        together = Decoder(models["qwen2_moe"], kind, variant, torch.bfloat16, threads=3)
        alone = Decoder(models["qwen2_moe"], kind, variant, torch.bfloat16, threads=1)
        both = together.logits(prompt(1), prompt(2, 7))
        assert torch.equal(both[:TOKENS], alone.logits(prompt(1)))
        assert torch.equal(both[TOKENS:], alone.logits(prompt(2, 7)))
        together.free()
        alone.free()


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_a_prompt_needs_no_logits(models: dict[str, Path], kind: str) -> None:
    for family in FAMILIES:
        decoder = Decoder(models[family], kind, VARIANTS[0], torch.float32)
        decoder.without_logits(prompt(0)[:20])
        assert decoder.logits(prompt(0)).isfinite().all()
        decoder.free()


def test_weights_take_the_memory_of_their_bits(models: dict[str, Path]) -> None:
    sizes = {}
    for kind in ("int8", "int4, groups of 128"):
        decoder = Decoder(models["qwen2"], kind, VARIANTS[0], torch.bfloat16)
        sizes[kind] = decoder.decoder.model.weight_bytes()
        decoder.free()
    assert sizes["int4, groups of 128"] < 0.8 * sizes["int8"]


def test_experts_of_a_layer_that_are_quantized_differently_are_refused(models: dict[str, Path]) -> None:
    decoder = Decoder(models["qwen2_moe"], "int8", VARIANTS[0], torch.float32)
    other = quantize_int4(torch.zeros(96, 64), 32)
    decoder.decoder.model.set_quantized(0, "experts.up", 1, native_weight(other), other.shape, 0)
    with pytest.raises(NativeError, match="quantized alike"):
        decoder.logits(prompt(0))
    same = quantize_int8(torch.zeros(96, 64))
    decoder.decoder.model.set_quantized(0, "experts.up", 1, native_weight(same), same.shape, 0)
    assert decoder.logits(prompt(0)).isfinite().all()
    decoder.free()


def test_a_step_without_an_embedding_is_refused() -> None:
    with (
        one_matrix(VARIANTS[0], quantize_int8(torch.zeros(64, 64))) as matrix,
        pytest.raises(NativeError, match="no embedding"),
    ):
        matrix.model.step(Step())
