"""Measures transformers on the same GPU with the same model: decode at several batch sizes, and a long prefill.

python -m bench.gpu.peer MODEL_DIRECTORY [--batches 1 8 64 256]
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from bench.gpu.timing import median_ms

CONTEXT, PREFILL = 1024, 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64, 256])
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to(torch.device("cuda")).eval()  # pyright: ignore[reportArgumentType] (wrapped by a decorator)
    found: dict[str, object] = {}
    for batch in options.batches:
        cache = DynamicCache()
        ids = torch.randint(1, 1000, (batch, CONTEXT), device="cuda")
        model(ids, past_key_values=cache, logits_to_keep=1)
        one = ids[:, :1]
        ms = median_ms(lambda: model(one, past_key_values=cache, logits_to_keep=1), 20)  # noqa: B023 (called at once)
        found[f"decode, batch {batch}"] = {"ms": round(ms, 2), "tokens_s": round(1e3 * batch / ms, 1)}
    prompt = torch.randint(1, 1000, (1, PREFILL), device="cuda")
    ms = median_ms(lambda: model(prompt, logits_to_keep=1), 3, 1)
    found[f"prefill, {PREFILL}"] = {"ms": round(ms, 1), "tokens_s": round(1e3 * PREFILL / ms)}
    print(json.dumps(found))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
