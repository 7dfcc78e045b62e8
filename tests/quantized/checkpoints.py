"""Checkpoints in the layouts of other packages, each beside the plain weights that it stands for.

The layouts are written here value by value, straight from their documents, and share no code with the readers. A layout
is a function of a weight [out, in] and its name that returns the tensors to store by suffix, and the plain weight in
float32.
"""

import json
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = dict[str, Tensor]
Layout = Callable[[Tensor, np.random.Generator, str], tuple[Stored, Tensor]]
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(values: NDArray[np.int64], bits: int, axis: int) -> Tensor:
    """Packs values along an axis into int32 words, the first value in the lowest bits."""
    moved = np.moveaxis(values, axis, -1)
    if bits == 3:
        # A stream of bits: some values go on in the next word.
        stream = (moved[..., None] >> np.arange(3) & 1).reshape(*moved.shape[:-1], -1, 32).astype(np.uint32)
        packed = (stream << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32)
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed.view(np.int32), -1, axis)))
    per_word = 32 // bits
    padded = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, -moved.shape[-1] % per_word)])
    packed = np.zeros((*padded.shape[:-1], padded.shape[-1] // per_word), dtype=np.uint32)
    for place in range(per_word):
        packed |= padded[..., place::per_word].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed.view(np.int32), -1, axis)))


def drawn(weight: Tensor, bits: int, groups: int, generator: np.random.Generator, *, symmetric: bool) -> Any:
    """Random values, zero points and scales of about the weight's size: (values, zeros, scales, groups' indices)."""
    out, width = weight.shape
    values = generator.integers(0, 1 << bits, (out, width))
    middle = 1 << (bits - 1)
    zeros = np.full((out, groups), middle) if symmetric else generator.integers(1, (1 << bits) - 1, (out, groups))
    spread = float(weight.float().abs().max()) / middle
    scales = (generator.uniform(0.3, 1.0, (out, groups)) * spread).astype(np.float16)
    index = np.arange(width) // -(-width // groups)
    return values, zeros, scales, index


def meaning(values: Any, zeros: Any, scales: Any, index: Any) -> Tensor:
    return torch.from_numpy(((values - zeros[:, index]) * scales.astype(np.float32)[:, index]).astype(np.float32))


def shuffled(index: Any, name: str, *, own: bool) -> Any:
    """The groups of a matrix's inputs in activation order: one for all matrices that read the same input.

    With `own`, each matrix has another one.
    """
    read = name if own else re.sub("[qkv]_proj", "qkv", re.sub("(gate|up)_proj", "up", name))
    return np.random.default_rng(zlib.crc32(read.encode())).permutation(index)


def gptq(
    bits: int = 4, *, symmetric: bool = False, desc_act: bool = False, own: bool = False, minus_one: bool = True
) -> Layout:
    def layout(weight: Tensor, generator: np.random.Generator, name: str) -> tuple[Stored, Tensor]:
        groups = weight.shape[1] // GROUP
        values, zeros, scales, index = drawn(weight, bits, groups, generator, symmetric=symmetric)
        if desc_act:
            index = shuffled(index, name, own=own)
        stored = {
            "qweight": words(values.T, bits, 0),
            "qzeros": words((zeros - minus_one).T, bits, 1),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(index.astype(np.int32)),
        }
        return stored, meaning(values, zeros, scales, index)

    return layout


def awq(weight: Tensor, generator: np.random.Generator, name: str) -> tuple[Stored, Tensor]:
    values, zeros, scales, index = drawn(weight, 4, weight.shape[1] // GROUP, generator, symmetric=False)

    def interleaved(matrix: NDArray[np.int64]) -> Tensor:
        """[n, out]: each eight outputs in the order of the format."""
        return words(matrix.reshape(len(matrix), -1, 8)[:, :, AWQ_ORDER].reshape(matrix.shape), 4, 1)

    stored = {
        "qweight": interleaved(values.T),
        "qzeros": interleaved(zeros.T),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return stored, meaning(values, zeros, scales, index)


def packed(bits: int, *, symmetric: bool, groups: bool = True, order: bool = False) -> Layout:
    """compressed-tensors, pack-quantized; with `order` its `actorder` is "group"."""

    def layout(weight: Tensor, generator: np.random.Generator, name: str) -> tuple[Stored, Tensor]:
        count = weight.shape[1] // GROUP if groups else 1
        values, zeros, scales, index = drawn(weight, bits, count, generator, symmetric=symmetric)
        index = shuffled(index, name, own=False) if order else index
        stored = {
            "weight_packed": words(values, bits, 1),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            stored["weight_zero_point"] = words(zeros, bits, 0)
        if order:
            stored["weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
        return stored, meaning(values, zeros, scales, index)

    return layout


def int8(weight: Tensor, generator: np.random.Generator, name: str) -> tuple[Stored, Tensor]:
    """compressed-tensors, int-quantized, a scale for each output."""
    values = generator.integers(-127, 128, weight.shape).astype(np.int8)
    scales = (generator.uniform(0.3, 1, (len(weight), 1)) * float(weight.abs().max()) / 127).astype(np.float32)
    stored = {"weight": torch.from_numpy(values), "weight_scale": torch.from_numpy(scales)}
    return stored, torch.from_numpy(values.astype(np.float32) * scales)


def fp8(block: int | None, scale_name: str = "weight_scale") -> Layout:
    def layout(weight: Tensor, generator: np.random.Generator, name: str) -> tuple[Stored, Tensor]:
        values = torch.from_numpy(generator.normal(0, 100, weight.shape).astype(np.float32)).to(torch.float8_e4m3fn)
        spread = float(weight.abs().max()) / 300
        if block is None:
            scale = torch.tensor([spread])
            return {"weight": values, scale_name: scale}, values.float() * spread
        rows, columns = (-(-size // block) for size in weight.shape)
        scales = torch.from_numpy(generator.uniform(0.3, 1, (rows, columns)).astype(np.float32)) * spread
        full = scales.repeat_interleave(block, 0)[: len(weight)].repeat_interleave(block, 1)[:, : weight.shape[1]]
        return {"weight": values, scale_name: scales}, values.float() * full

    return layout


def compressed(num_bits: int, kind: str = "int", rows: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": num_bits, "type": kind, **weights}}
    if rows is not None:
        group["input_activations"] = rows
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


_GPTQ = {"quant_method": "gptq", "group_size": GROUP}
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "gptq": (gptq(), {**_GPTQ, "bits": 4}),
    "gptq, symmetric": (gptq(symmetric=True), {**_GPTQ, "bits": 4, "sym": True}),
    "gptq, inputs in another order": (gptq(desc_act=True), {**_GPTQ, "bits": 4, "desc_act": True}),
    "gptq, each matrix in another order": (gptq(desc_act=True, own=True), {**_GPTQ, "bits": 4, "desc_act": True}),
    "gptq, 8 bits, inputs in another order": (gptq(8, desc_act=True), {**_GPTQ, "bits": 8, "desc_act": True}),
    "gptq, 2 bits": (gptq(2), {**_GPTQ, "bits": 2}),
    "gptq, 3 bits, symmetric, inputs in another order": (
        gptq(3, symmetric=True, desc_act=True),
        {**_GPTQ, "bits": 3, "sym": True, "desc_act": True},
    ),
    "gptq, second version": (gptq(minus_one=False), {**_GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"}),
    "gptq, 8 bits": (gptq(8), {**_GPTQ, "bits": 8}),
    "gptq, 8 bits, symmetric": (gptq(8, symmetric=True), {**_GPTQ, "bits": 8, "sym": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "w4a16": (packed(4, symmetric=True), compressed(4, group_size=GROUP)),
    "w4a16, zero points": (packed(4, symmetric=False), compressed(4, group_size=GROUP, symmetric=False)),
    "w4a16, inputs in another order": (
        packed(4, symmetric=True, order=True),
        compressed(4, group_size=GROUP, actorder="group"),
    ),
    "w8a16, zero points": (
        packed(8, symmetric=False, groups=False),
        compressed(8, strategy="channel", symmetric=False),
    ),
    "w8a16, packed": (packed(8, symmetric=True, groups=False), compressed(8, strategy="channel")),
    "w8a16": (int8, compressed(8, strategy="channel")),
    "fp8": (fp8(None), {"quant_method": "fp8"}),
    "fp8, blocks": (fp8(32, "weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "fp8, compressed": (fp8(None), compressed(8, "float", strategy="tensor")),
}
"""Name of a layout → how it stores a weight, and the `quantization_config` beside it."""


def make_checkpoints(model: Path, name: str, target: Path) -> tuple[Path, Path]:
    """Writes a model with its projections in a layout, and the plain float32 model that it stands for."""
    layout, settings = LAYOUTS[name]
    generator = np.random.default_rng(7)
    plain: Stored = {}
    stored: Stored = {}
    for key, tensor in load_file(model / "model.safetensors").items():
        plain[key] = stored[key] = tensor
        if ("_proj" in key or ".experts." in key) and key.endswith("weight"):
            parts, plain[key] = layout(tensor, generator, key)
            del stored[key]
            stored |= {f"{key.removesuffix('weight')}{part}": value for part, value in parts.items()}
    directories = target / "quantized", target / "plain"
    for directory, tensors in zip(directories, (stored, plain), strict=True):
        shutil.copytree(model, directory)
        contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(contiguous, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (directories[0] / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return directories
