"""The tensors of a quantized matrix in the file formats, and the `quantization_config` of config.json.

The layouts are those of compressed-tensors (8 bits), AutoAWQ and GPTQ; `services/engine/quantization/formats` documents
and reads them. Called by the module `run` of this package.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from antiphon.services.engine.quantization.formats.awq import ORDER, PER_WORD
from antiphon.services.engine.quantization.formats.packing import pack
from antiphon.services.engine.quantizer.grid import Rounded
from antiphon.services.engine.quantizer.job import Algorithm
from antiphon.services.engine.quantizer.plan import Plan

DAMPING = 0.01
"""GPTQ: share of the mean of the Hessian's diagonal that is added to it."""
_SIGNED = 128


def stored(algorithm: Algorithm, module: str, matrix: Rounded) -> dict[str, Tensor]:
    """Returns the tensors of a module's weight by their names in the checkpoint."""
    parts = {"weight_only_int8": _packed, "smooth_quant": _bytes, "awq": _awq, "gptq": _gptq}[algorithm](matrix)
    return {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}


def quantization_config(
    algorithm: Algorithm,
    plan: Plan,
    *,
    activation_order: bool = False,
    rounds_embedding: bool = False,
    others: Iterable[str] = (),
) -> dict[str, Any]:
    """Returns the object by which loaders recognise the layout.

    `activation_order`: the option of gptq. `rounds_embedding`: see `Job`. `others`: modules of other parts of the
    model, which are not quantized.
    """
    plain = sorted({*plan.plain_linears(), *others})
    if algorithm == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": plan.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": plain,
        }
    if algorithm == "gptq":
        # Loaders assume that every linear layer of a block is quantized unless `dynamic` names it, but not the head.
        excluded: dict[str, Any] = {}
        if len(plain) > 1:
            excluded = {"dynamic": {f"-:^{re.escape(name)}$": {} for name in plain}}
        return {
            **excluded,
            "quant_method": "gptq",
            "bits": 4,
            "group_size": plan.group_size,
            "desc_act": activation_order,
            "sym": True,
            "damp_percent": DAMPING,
            "true_sequential": False,
            "static_groups": False,
            "lm_head": False,
            "checkpoint_format": "gptq",
        }
    targets = ["Linear"]
    if rounds_embedding:
        targets.append("Embedding")
        plain = sorted({*plain, *plan.other_embeddings()})
    return _compressed(targets, plain, rows=algorithm == "smooth_quant")


def _compressed(targets: list[str], plain: list[str], *, rows: bool) -> dict[str, Any]:
    bits = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": targets,
        "weights": {**bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**bits, "strategy": "token", "dynamic": True} if rows else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if rows else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": plain,
        "kv_cache_scheme": None,
    }


def _packed(matrix: Rounded) -> dict[str, Tensor]:
    return {
        "weight_packed": pack(matrix.values.to(torch.int16) + _SIGNED, 8),
        "weight_scale": matrix.scales,
        "weight_shape": torch.tensor(matrix.values.shape),
    }


def _bytes(matrix: Rounded) -> dict[str, Tensor]:
    return {"weight": matrix.values, "weight_scale": matrix.scales}


def _awq(matrix: Rounded) -> dict[str, Tensor]:
    assert matrix.zeros is not None
    return {
        "qweight": pack(_interleaved(matrix.values.t()), 4),
        "qzeros": pack(_interleaved(matrix.zeros.t()), 4),
        "scales": matrix.scales.t(),
    }


def _interleaved(values: Tensor) -> Tensor:
    """Reorders each eight outputs of [n, out] as AWQ stores them in a word."""
    return values.unflatten(-1, (-1, PER_WORD))[..., list(ORDER)].flatten(-2)


def _gptq(matrix: Rounded) -> dict[str, Tensor]:
    assert matrix.zeros is not None
    return {
        "qweight": pack(matrix.values, 4).t(),
        "qzeros": pack(matrix.zeros.t().to(torch.int16) - 1, 4),
        "scales": matrix.scales.t(),
        "g_idx": matrix.group_of_input().to(torch.int32),
    }
