"""LoRA adapters for tests: written as peft writes them, and merged into a model's weights by LoRA's formula."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LLAMA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    directory: Path,
    model: Path,
    *,
    targets: Sequence[str] = LLAMA_TARGETS,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 1,
    strength: float = 1.0,
    **fields: Any,
) -> Path:
    """Writes a random adapter for every module of the model whose last name is in `targets`; gives the directory back.

    `fields` are further fields of adapter_config.json.
    """
    import torch
    from safetensors.torch import load_file, save_file

    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    transposed = json.loads((model / "config.json").read_text())["model_type"] == "gpt2"
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if weight.dim() != 2 or module.rpartition(".")[2] not in targets:
            continue
        out, inner = weight.shape[::-1] if transposed else weight.shape
        a = torch.randn(rank, inner, generator=generator) / inner**0.5
        b = torch.randn(out, rank, generator=generator) * strength / rank**0.5
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    assert tensors, "the model has no such modules"
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": list(targets),
        "inference_mode": True,
        **fields,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merge(directory: Path, model: Path, adapter: Path) -> Path:
    """Writes a copy of the model whose weights include the adapter's products; gives the directory back."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, directory)
    config = json.loads((adapter / "adapter_config.json").read_text())
    transposed = json.loads((model / "config.json").read_text())["model_type"] == "gpt2"
    weights, deltas = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in deltas if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = deltas[name].double(), deltas[name.replace("lora_A", "lora_B")].double()
        rank = a.shape[0]
        alpha = config.get("alpha_pattern", {}).get(module.rpartition(".")[2], config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        product = (b @ a) * scale
        weight = weights[f"{module}.weight"]
        weights[f"{module}.weight"] = (weight.double() + (product.t() if transposed else product)).to(weight.dtype)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    return directory


def make_prompt_adapter(directory: Path, model: Path, *, num_tokens: int = 5, seed: int = 1, **fields: Any) -> Path:
    """Writes a random prompt adapter (prompt tuning); gives the directory back."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    width = json.loads((model / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_tokens, width.get("hidden_size") or width["n_embd"], generator=generator) * 0.3
    save_file({"prompt_embeddings": rows}, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "PROMPT_TUNING",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "num_virtual_tokens": num_tokens,
        "token_dim": rows.shape[1],
        **fields,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def prompted_reference(model: Path, adapter: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers generates greedily behind an adapter's vectors and the prompt."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    rows = load_file(adapter / "adapter_model.safetensors")["prompt_embeddings"]
    embed, ids = reference.get_input_embeddings(), list[int]()
    with torch.inference_mode():
        for _ in range(num_tokens):
            tokens = torch.tensor([*prompt, *ids])
            logits = reference(inputs_embeds=torch.cat([rows, embed(tokens)])[None]).logits
            ids.append(int(logits[0, -1].argmax()))
    return ids
