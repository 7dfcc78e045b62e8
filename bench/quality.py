"""Quality of quantized weights: the perplexity of the demo model when it is quantized by each method.

    python -m bench.quality [--texts 40] [--model DIRECTORY] [--prepared awq gptq] [--token FILE]

The model must have the demo model's tokenizer and be trained on its texts: `python -m infra.demo_model.train --shape
qwen2-0.5b` trains a larger one, on a CPU from what `python -m infra.demo_model.grow` makes.

Prepared checkpoints (quantized beforehand) are written by `antiphon quantize` into a temporary directory. The C++
backend runs the model in each form on stories that neither training nor calibration has seen. The output is the
perplexity relative to that of the original weights. A large model takes a quarter of an hour for each method on a few
cores; `--prepared` chooses the methods, and with `--token` they are calibrated with the token ids of a file, a sample
in each line.
"""

import argparse
import contextlib
import io
import math
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from antiphon import LLM, SamplingParams
from antiphon.cli import main as antiphon
from antiphon.services.engine.quantization.rounding import quantize_int4
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.shared.models.model_files import DEMO_DIRECTORY
from bench.quantized_decode import rounding
from infra.demo_model.evaluate import unseen_stories

PREPARED = (
    "weight_only_int8",
    "weight_only_int8 --no-round-embedding",
    "smooth_quant",
    "awq",
    "gptq",
    "gptq --desc-act",
)
ONLINE = {name: f"`--quantization {name}`" for name in ("ifq", "ifq_w8a8", "ifq_w4a8", "ifq_nf4")}
NEAREST: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "4 bits, groups of 128, nearest value": partial(quantize_int4, group_size=128),
    "4 bits with zero points, groups of 128, nearest value": partial(quantize_int4, group_size=128, zero_points=True),
    "4 bits, groups of 32, nearest value": partial(quantize_int4, group_size=32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Perplexity of quantized weights.")
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--model", type=Path, default=DEMO_DIRECTORY)
    parser.add_argument("--prepared", nargs="*", choices=PREPARED, default=PREPARED, metavar="METHOD")
    parser.add_argument("--token", type=Path, help="file of token ids for the calibration")
    options = parser.parse_args()
    texts, model = unseen_stories(options.texts), options.model
    original = perplexity(texts, model)
    print("| weights | perplexity |\n|---|---|")
    print(f"| original, bfloat16 | 1 ({original:.4f}) |", flush=True)

    def tell(name: str, measured: float) -> None:
        print(f"| {name} | {measured / original:.4f} |", flush=True)

    for mode, name in ONLINE.items():
        tell(name, perplexity(texts, model, quantization=mode))
    with tempfile.TemporaryDirectory(prefix="antiphon-quality-") as directory:
        for algorithm in options.prepared:
            target = Path(directory) / algorithm
            tell(f"`{algorithm}`", perplexity(texts, prepared(model, algorithm, target, options.token)))
            shutil.rmtree(target)
    for name, rounded in NEAREST.items():
        with rounding(name, rounded):
            tell(name, perplexity(texts, model))


def prepared(model: Path, algorithm: str, target: Path, token: Path | None = None) -> Path:
    """Writes a checkpoint of a model as a user does. `algorithm`: value of `-quant_type`, then other options.

    `token`: file of token ids for the calibration; None: the text that comes with antiphon.
    """
    words = ["-i", str(model), "-o", str(target), "-quant_type", *algorithm.split(), "-tp", "2", "-t", "bf16"]
    words += [] if token is None else ["-token", str(token)]
    with contextlib.redirect_stdout(io.StringIO()):
        code = antiphon(["quantize", *words])
    if code:
        raise SystemExit(f"antiphon quantize has ended with code {code}")
    return target


def perplexity(texts: list[str], model: Path, **settings: Any) -> float:
    """Returns the perplexity of the texts."""
    with LLM(model=str(model), device="cpu", kv_cache_memory_gb=0.1, **settings) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        total, count = 0.0, 0
        for output in llm.generate(texts, params, use_tqdm=False):
            assert output.prompt_logprobs is not None
            assert output.prompt_token_ids is not None
            for token_id, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
                assert entry is not None
                total += entry[token_id].logprob
                count += 1
    return math.exp(-total / count)


if __name__ == "__main__":
    main()
