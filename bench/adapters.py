"""What LoRA adapters cost: tokens/s of streams that all have different adapters, compared with the base model's.

    python -m bench.adapters --model DIRECTORY [--adapters 64] [--rank 16] [--streams 32] [--rounds 5] [--json FILE]

The adapters are random and of one rank. One server holds all of them. The two loads (streams with adapters, streams of
the base model) alternate (A B B A …), and in each round the streams have other adapters. The figure is the median over
the rounds of the tokens/s with adapters divided by those of the base model. The time until an adapter is read from its
files is not measured: every adapter has served a request before.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from antiphon.benchmark.load import Result, run_open
from bench.harness.output import print_and_save
from bench.harness.serving import HOST, Serving, end_in_order

ATTENTION = ("q_proj", "v_proj")
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = {"attention": ATTENTION, "every": EVERY}
"""The adapted matrices: peft's default for Llama's family, and all of them."""
GOAL = 0.8


def main() -> int:
    """Measures both kinds of adapters and prints the figures."""
    options = parse()
    end_in_order()
    found = {name: measure(options, targets) for name, targets in TARGETS.items()}
    print_and_save({"goal": GOAL, **found}, options.json)
    return 0


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command-line options."""
    parser = argparse.ArgumentParser(description="What LoRA adapters cost.")
    parser.add_argument("--model", type=Path, required=True, help="model directory, of Llama's or Qwen's family")
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of a stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(argv)
    if not 1 <= options.streams <= options.adapters:
        parser.error("--streams must be between 1 and --adapters: each stream has an adapter of its own")
    return options


def measure(options: argparse.Namespace, targets: Sequence[str]) -> dict[str, Any]:
    """Returns the figures of one server whose adapters change the matrices `targets`."""
    with tempfile.TemporaryDirectory() as directory:
        names = [f"adapter-{number}" for number in range(options.adapters)]
        for number, name in enumerate(names):
            write_adapter(Path(directory) / name, options.model, targets, options.rank, seed=number)
        flags = [
            f"--model={options.model}",
            "--lora-modules",
            *(f"{name}={directory}/{name}" for name in names),
            f"--max-loras={options.streams}",
            f"--max-cpu-loras={options.adapters}",
            f"--max-lora-rank={options.rank}",
        ]
        with Serving(*flags) as server:
            return asyncio.run(_rounds(server, options, names))


def write_adapter(directory: Path, model: Path, targets: Sequence[str], rank: int, seed: int) -> None:
    """Writes a random LoRA adapter in peft's format."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in sorted(weights.keys()):
                module = name.removesuffix(".weight")
                if name.endswith(".weight") and module.rpartition(".")[2] in targets:
                    rows, columns = weights.get_slice(name).get_shape()
                    key = f"base_model.model.{module}"
                    tensors[f"{key}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) / columns**0.5
                    tensors[f"{key}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) / rank**0.5
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


async def _rounds(server: Serving, options: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    chance, plain = random.Random(0), server.model_name()
    vocab = json.loads((options.model / "config.json").read_text())["vocab_size"]

    async def rate(models: Sequence[str], tokens: int) -> float:
        bodies = [
            {
                "model": model,
                "prompt": [chance.randrange(10, vocab) for _ in range(options.prompt)],
                "max_tokens": tokens,
                "ignore_eos": True,
            }
            for model in models
        ]
        return _checked(await run_open(HOST, server.port, bodies, [0.0] * len(bodies))).tokens_per_s

    for start in range(0, len(names), options.streams):
        await rate(names[start : start + options.streams], 2)
    await rate([plain] * options.streams, options.tokens)
    rates: dict[bool, list[float]] = {False: [], True: []}
    for number in range(options.rounds):
        for adapted in (False, True) if number % 2 == 0 else (True, False):
            models = chance.sample(names, options.streams) if adapted else [plain] * options.streams
            rates[adapted].append(await rate(models, options.tokens))
    shares = sorted(adapted / base for base, adapted in zip(rates[False], rates[True], strict=True))
    return {
        "adapters": len(names),
        "rank": options.rank,
        "streams": options.streams,
        "base_tokens_per_s": round(statistics.median(rates[False]), 1),
        "adapted_tokens_per_s": round(statistics.median(rates[True]), 1),
        "share": round(statistics.median(shares), 3),
        "shares": [round(share, 3) for share in shares],
    }


def _checked(result: Result) -> Result:
    if result.errors:
        raise SystemExit(result.errors[0])
    return result


if __name__ == "__main__":
    sys.exit(main())
