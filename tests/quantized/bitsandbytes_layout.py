"""Writes weights in the layouts of bitsandbytes, each beside the plain weight that it stands for.

Written value by value from the layout's description, without the product's code. Tensors that the package itself wrote
are in `tests/golden/bitsandbytes.safetensors`.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NF4 = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.09105004, 0.0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.562617, 0.7229568, 1.0]
Stored = dict[str, Tensor]


def four_bits(weight: Tensor, *, nested: bool = True, block: int = 64) -> tuple[Stored, Tensor]:
    """The tensors by suffix, and the plain weight."""
    numbers, levels = weight.flatten(), torch.tensor(NF4)
    padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % block)).view(-1, block)
    scales = padded.abs().amax(dim=1)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
    stored: Stored = {"weight.absmax": scales, "weight.quant_map": levels}
    if nested:
        offset, table = float(scales.mean()), torch.linspace(-1, 1, 256)
        rest = torch.nn.functional.pad(scales - offset, (0, -len(scales) % 256)).view(-1, 256)
        largest = rest.abs().amax(dim=1)
        places = ((rest / largest[:, None])[..., None] - table).abs().argmin(dim=-1)
        scales = (table[places] * largest[:, None]).flatten()[: len(scales)] + offset
        stored["weight.absmax"] = places.flatten()[: len(scales)].to(torch.uint8)
        stored |= {"weight.nested_absmax": largest, "weight.nested_quant_map": table}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    values = ((padded / scales[:, None])[..., None] - levels).abs().argmin(dim=-1)
    plain = (levels[values] * scales[:, None]).flatten()[: len(numbers)].view(weight.shape)
    values = values.flatten().to(torch.uint8)[: len(numbers)]
    stored["weight"] = ((values[::2] << 4) | values[1::2])[:, None]
    blob = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    stored["weight.quant_state.bitsandbytes__nf4"] = blob
    return stored, plain


def eight_bits(weight: Tensor) -> tuple[Stored, Tensor]:
    """LLM.int8's layout: the tensors by suffix, and the plain weight."""
    largest = weight.abs().amax(dim=1)
    values = (weight / largest[:, None] * 127).round().to(torch.int8)
    stored = {"weight": values, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, values.float() * (largest[:, None] / 127)


def make_checkpoints(model: Path, bits: int, target: Path, nested: bool = True) -> tuple[Path, Path]:
    """Writes a model with its projections quantized, and the plain float32 model that it stands for."""
    plain: Stored = {}
    stored: Stored = {}
    for key, tensor in load_file(model / "model.safetensors").items():
        plain[key] = stored[key] = tensor
        if "_proj" in key and key.endswith("weight"):
            parts, plain[key] = four_bits(tensor, nested=nested) if bits == 4 else eight_bits(tensor)
            del stored[key]
            stored |= {f"{key.removesuffix('weight')}{part}": value for part, value in parts.items()}
    directories = target / "quantized", target / "plain"
    for directory, tensors in zip(directories, (stored, plain), strict=True):
        shutil.copytree(model, directory)
        save_file(
            {key: x.contiguous() for key, x in tensors.items()}, directory / "model.safetensors", {"format": "pt"}
        )
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": bits == 4,
        "load_in_8bit": bits == 8,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": None,
    }
    (directories[0] / "config.json").write_text(json.dumps(config))
    return directories
