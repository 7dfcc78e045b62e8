"""Trains a layer that predicts the token after the next one, and writes it with the demo model's own layers.

Run by hand: ``python -m infra.demo_model.drafts.train OUT --minutes 6``. The model stays as it is; the new layer learns
what the model itself would say. OUT is a checkpoint of GLM 4 MoE's architecture, the smallest change of the demo
model's with such a layer: all its layers are dense, and the new one's MLP is divided between two experts that every
token uses. `bench/engine/drafts.py` measures with it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from infra.demo_model.batches import Batch, Maker
from infra.demo_model.generate import load_model
from infra.demo_model.model import Layer, Llama, RMSNorm, View, document_mask, rope_tables
from infra.demo_model.tokenizer import DEMO, load
from infra.demo_model.train import pace

_RATE, _POSITIONS, _WARM_UP = 2e-3, 1024, 30
_REPORT_STEPS = 25
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


class DraftLayer(nn.Module):
    """One more layer, which reads of each token its final hidden state and the embedding of the token after it."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        shape = model.shape
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.shape = shape
        self.enorm, self.hnorm, self.norm = (RMSNorm(size, eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = Layer(shape)
        nn.init.normal_(self.eh_proj.weight, std=size**-0.5 / 2)
        # Near to the model's last layer, which reads similar states.
        self.layer.load_state_dict(model.model.layers[-1].state_dict())
        self.norm.load_state_dict(model.model.norm.state_dict())

    def forward(self, hidden: Tensor, embedded: Tensor, mask: Tensor) -> Tensor:
        """Hidden states, and embeddings of the tokens after them, [rows, length, hidden] → states for the head."""
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        cos, sin = rope_tables(self.shape, hidden.shape[1])
        return self.norm(self.layer(joined, *View(cos, sin, mask)))


def examples(model: Llama, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The hidden states, embeddings and mask of a batch's rows, the positions to learn, and what the model says there.

    At position p it is what the model says at p + 1, where its answer is to be learnt.
    """
    ids, owner = torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.owner)
    mask = document_mask(owner, torch.float32)
    with torch.inference_mode():
        hidden = model.hidden(ids, mask)
    hidden = hidden.clone()
    places = torch.from_numpy(batch.places).long()
    places = places[places % ids.shape[1] > 0].unique()
    places = places[owner.flatten()[places] == owner.flatten()[places - 1]]
    with torch.no_grad():
        says = model.logits(hidden.flatten(0, 1)[places]).softmax(-1)
        following = F.embedding(torch.roll(ids, -1, dims=1), model.model.embed_tokens.weight)
    return hidden, following, mask, places - 1, says


def train(model: Llama, minutes: float, seed: int) -> DraftLayer:
    """Trains for a time. Prints the loss and how often the layer's likeliest token is the model's."""
    torch.manual_seed(seed)
    layer, maker = DraftLayer(model), Maker(load(DEMO), seed)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=_RATE, betas=(0.9, 0.97), weight_decay=0.02)
    started, step = time.monotonic(), 0
    while (progress := (time.monotonic() - started) / 60.0 / minutes) < 1.0:
        hidden, following, mask, places, says = examples(model, maker.batch(step, _POSITIONS))
        for group in optimizer.param_groups:
            group["lr"] = _RATE * pace(progress, step, _WARM_UP)
        logits = model.logits(layer(hidden, following, mask).flatten(0, 1)[places])
        loss = F.cross_entropy(logits, says)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % _REPORT_STEPS == 0:
            right = (logits.argmax(-1) == says.argmax(-1)).float().mean()
            print(f"step {step}, {60 * minutes * progress:.0f} s: loss {loss:.3f}, right {right:.1%}", flush=True)
    return layer.eval()


def config(model: Llama) -> dict[str, Any]:
    """The ``config.json`` of the demo model as GLM 4 MoE with dense layers only."""
    shape, demo = model.shape, json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    return {
        **demo,
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "partial_rotary_factor": 1.0,
        "use_qk_norm": False,
        "first_k_dense_replace": shape.num_hidden_layers,
        "n_routed_experts": 2,
        "n_shared_experts": 0,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": shape.intermediate_size // 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 1,
    }


def tensors(model: Llama, layer: DraftLayer) -> dict[str, Tensor]:
    """The weights by their names in checkpoints."""
    prefix = f"model.layers.{model.shape.num_hidden_layers}"
    found = dict(model.state_dict())
    for name, weight in layer.state_dict().items():
        if name.startswith("layer.mlp."):
            continue
        ours = name.removeprefix("layer.") if name.startswith("layer.") else name
        found[f"{prefix}.{'shared_head.' if name == 'norm.weight' else ''}{ours}"] = weight
    mlp = layer.layer.mlp
    # The router does not tell the experts apart, so each has half of the weight.
    found[f"{prefix}.mlp.gate.weight"] = torch.zeros(2, model.shape.hidden_size)
    found[f"{prefix}.mlp.gate.e_score_correction_bias"] = torch.zeros(2)
    for expert in range(2):
        name = f"{prefix}.mlp.experts.{expert}"
        found[f"{name}.gate_proj.weight"] = mlp.gate_proj.weight.chunk(2)[expert]
        found[f"{name}.up_proj.weight"] = mlp.up_proj.weight.chunk(2)[expert]
        found[f"{name}.down_proj.weight"] = 2.0 * mlp.down_proj.weight.chunk(2, dim=1)[expert]
    return {name: weight.detach().to(torch.bfloat16).contiguous().clone() for name, weight in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = load_model(DEMO)
    if any(model.model.far):
        raise SystemExit("a model with a layer that sees far has no equal in this architecture")
    layer = train(model, arguments.minutes, arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER:
        shutil.copyfile(DEMO / name, arguments.out / name)
    (arguments.out / "config.json").write_text(json.dumps(config(model), indent=2) + "\n", encoding="utf-8")
    save_file(tensors(model, layer), arguments.out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
