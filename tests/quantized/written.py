"""What the tensors of a written checkpoint stand for, computed value by value from the layouts' documents."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of eight outputs."""


def values_of(words: Tensor, bits: int, axis: int, places: tuple[int, ...] = ()) -> NDArray[np.int64]:
    """Unpacks words along an axis; the value with index i is in the place places[i], i without `places`."""
    moved = np.moveaxis(words.numpy().view(np.uint32), axis, -1)
    order = places or tuple(range(32 // bits))
    parts = [(moved >> np.uint32(bits * place)) & np.uint32((1 << bits) - 1) for place in order]
    return np.moveaxis(np.stack(parts, -1).reshape(*moved.shape[:-1], -1), -1, axis).astype(np.int64)


def plain_weight(parts: dict[str, Tensor], method: str) -> Tensor:
    """The weight [out, in] float32 of one module."""
    if method == "awq":
        values = values_of(parts["qweight"], 4, 1, AWQ_PLACES).T
        zeros = values_of(parts["qzeros"], 4, 1, AWQ_PLACES).T
        return grouped(values, zeros, parts["scales"])
    if method == "gptq":
        values, zeros = values_of(parts["qweight"], 4, 0).T, values_of(parts["qzeros"], 4, 1).T + 1
        groups = parts["g_idx"].numpy()
        assert (np.bincount(groups) == values.shape[1] // zeros.shape[1]).all()
        centred = torch.from_numpy(values - zeros[:, groups]).float()
        return centred * parts["scales"].float().t()[:, parts["g_idx"].to(torch.int64)]
    scales = parts["weight_scale"].float()
    if "weight_packed" in parts:
        values = values_of(parts["weight_packed"], 8, 1)[:, : int(parts["weight_shape"][1])] - 128
        return torch.from_numpy(values).float() * scales
    return parts["weight"].float() * scales


def grouped(values: NDArray[np.int64], zeros: NDArray[np.int64], scales: Tensor) -> Tensor:
    size = values.shape[1] // zeros.shape[1]
    centred = torch.from_numpy(values - zeros.repeat(size, axis=1)).float()
    return centred * scales.float().t().repeat_interleave(size, 1)


def all_tensors(directory: Path) -> dict[str, Tensor]:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return {
        name: t for file in sorted(set(index["weight_map"].values())) for name, t in load_file(directory / file).items()
    }


def fused(tensors: dict[str, Tensor], *, in_rows: bool) -> dict[str, Tensor]:
    """The tensors with all experts of a layer in one: [experts, out, in] if `in_rows`, else [experts, in, out]."""
    single: dict[str, Tensor] = {}
    of: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        layer, found, rest = name.partition(".experts.")
        if not found:
            single[name] = tensor
            continue
        number, kind, _ = rest.split(".")
        of.setdefault(f"{layer}.experts", {}).setdefault(int(number), {})[kind] = tensor
    for experts, each in of.items():
        ups = [torch.cat([each[n]["gate_proj"], each[n]["up_proj"]]) for n in sorted(each)]
        for name, parts in (("gate_up_proj", ups), ("down_proj", [each[n]["down_proj"] for n in sorted(each)])):
            joined = torch.stack(parts)
            single[f"{experts}.{name}"] = (joined if in_rows else joined.transpose(1, 2)).contiguous()
    return single


def write_plain(
    quantized: Path, target: Path, transposed: tuple[str, ...] = (), fuse: Callable[..., dict[str, Tensor]] = dict
) -> Path:
    """Writes the float32 model that a quantized checkpoint stands for. `fuse`: last change of the tensors."""
    config: dict[str, Any] = json.loads((quantized / "config.json").read_text())
    method = config.pop("quantization_config")["quant_method"]
    tensors = all_tensors(quantized)
    plain: dict[str, Tensor] = {}
    for module in sorted({name.rpartition(".")[0] for name in tensors}):
        parts = {name.rpartition(".")[2]: t for name, t in tensors.items() if name.rpartition(".")[0] == module}
        if "scales" in parts or "weight_scale" in parts:
            weight = plain_weight(parts, method)
            plain[f"{module}.weight"] = (weight.t() if module.endswith(transposed or ("-",)) else weight).contiguous()
            parts = {name: tensor for name, tensor in parts.items() if name == "bias"}
        plain |= {f"{module}.{name}": tensor.float() for name, tensor in parts.items()}
    shutil.copytree(quantized, target, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    save_file(fuse(plain), target / "model.safetensors", {"format": "pt"})
    key = "dtype" if "dtype" in config else "torch_dtype"
    (target / "config.json").write_text(json.dumps(config | {key: "float32"}))
    return target
