"""Loads the checkpoints of `antiphon quantize` in vLLM's CPU build and compares greedy tokens: `make vllm-test`.

    python -m bench.peer_systems.vllm_loads --vllm ENVIRONMENT/bin/python [--layouts awq gptq …]

The demo model is quantized with each algorithm. vLLM generates tokens with the files, and Antiphon computes the
log-probabilities for each prompt followed by vLLM's tokens. So each position is compared after the same text: its `gap`
is the difference between the log-probability of Antiphon's best token and that of vLLM's token, 0 if they agree. Two
systems add up in different orders, and vLLM rounds logits to bfloat16, whose numbers from 16 to 32 are an eighth apart:
two tokens that are nearly equally likely may change places. Weights that are read wrongly give gaps of several units.
"""

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from antiphon import LLM, SamplingParams
from antiphon.cli import main as antiphon
from antiphon.shared.models.model_files import DEMO_DIRECTORY
from bench.harness.output import save
from bench.harness.serving import ROOT
from bench.limits_of_machine import machine
from bench.peer_systems.peer_servers import vllm_environment

GAP_MAX = 0.25
"""The largest gap of a layout that is read correctly."""
TIMEOUT_S = 300.0
WITHOUT_KERNEL = ("weight_only_int8",)
"""Layouts for which vLLM has no kernel on a CPU; its refusal of these is expected."""
NOT_ON_CPU = "vLLM cannot run it on a CPU"
PROMPTS = ("Once upon a time", "The cat", "One day, Lily and her mother", "There was a small boat")
GREEDY = Path(__file__).with_name("vllm_greedy.py")
LAYOUTS = {
    "awq": "AWQ, 4 bits with zero points in groups of 128",
    "gptq": "GPTQ, 4 bits in groups of 128",
    "gptq_as_w4a16": "compressed-tensors W4A16, the numbers of gptq",
    "smooth_quant": "compressed-tensors W8A8",
    "weight_only_int8": "compressed-tensors W8A16",
}
"""The layouts by their algorithm. `gptq_as_w4a16` is not written by `antiphon quantize`, but read by both systems."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result for one layout. `refusal`: why vLLM did not load it; then there are no other figures."""

    layout: str
    tokens: int = 0
    """Tokens that vLLM generated."""
    same_best: int = 0
    """How many of them are the best for Antiphon too."""
    gap: float = 0.0
    """The largest gap of a token."""
    refusal: str | None = None

    @property
    def passed(self) -> bool:
        """Whether vLLM reads the layout as Antiphon does, or is known to have no kernel for it on a CPU."""
        if self.refusal:
            return self.layout in WITHOUT_KERNEL and self.refusal.startswith(NOT_ON_CPU)
        return self.tokens > 0 and self.gap <= GAP_MAX

    def line(self) -> str:
        """Returns the row of the printed table."""
        figures = self.refusal or f"{self.same_best} of {self.tokens} tokens are the same, largest gap {self.gap:.3f}"
        return f"| {LAYOUTS[self.layout]} | {figures} | {'passed' if self.passed else 'FAILED'} |"


def main() -> int:
    parser = argparse.ArgumentParser(description="Checkpoints of `antiphon quantize` in vLLM.")
    parser.add_argument("--vllm", type=Path, required=True, help="Python of an environment with vLLM's CPU build")
    parser.add_argument("--layouts", nargs="*", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results" / "vllm-loads.json")
    options = parser.parse_args()
    versions: set[str] = set()
    found: list[Comparison] = []
    with tempfile.TemporaryDirectory(prefix="antiphon-vllm-") as directory:
        for layout in options.layouts:
            model = checkpoint(layout, Path(directory))
            found.append(compare(options.vllm, layout, model, options.tokens, versions))
            print(found[-1].line(), flush=True)
    head = {"machine": machine.facts(), "vllm": sorted(versions), "model": DEMO_DIRECTORY.name, "gap_max": GAP_MAX}
    record = {**head, "layouts": [{**asdict(one), "passed": one.passed} for one in found]}
    save(record, options.results)
    print(f"written to {options.results}")
    return 0 if all(one.passed for one in found) else 1


def checkpoint(layout: str, directory: Path) -> Path:
    """Returns the demo model in a layout; writes it below `directory` unless it is there."""
    target = directory / layout
    if layout == "gptq_as_w4a16":
        repack(checkpoint("gptq", directory), target)
    elif not target.exists():
        words = ["-i", str(DEMO_DIRECTORY), "-o", str(target), "-quant_type", layout, "-tp", "1", "-t", "bf16"]
        if layout == "weight_only_int8":
            words += ["--no-round-embedding"]  # vLLM does not read an embedding in 8 bits that is also the head
        with contextlib.redirect_stdout(io.StringIO()):
            code = antiphon(["quantize", *words])
        if code:
            raise SystemExit(f"antiphon quantize has ended with code {code}")
    return target


def repack(gptq: Path, target: Path) -> None:
    """Writes a GPTQ checkpoint of 4 bits in the layout `pack-quantized` of compressed-tensors."""
    target.mkdir()
    tensors: dict[str, Tensor] = {}
    for path in gptq.glob("model-*.safetensors"):
        tensors |= packed(load_file(path))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    for path in gptq.glob("*.json"):
        if not path.name.endswith(".index.json"):
            (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((gptq / "config.json").read_text(encoding="utf-8"))
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": config["quantization_config"]["group_size"],
        "dynamic": False,
        "actorder": None,
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames the tensors of GPTQ to those of compressed-tensors; the words of both hold the same bits."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part == "qweight":
            result[f"{module}.weight_packed"] = tensor.t().contiguous()
            result[f"{module}.weight_shape"] = torch.tensor([tensor.shape[1], tensor.shape[0] * 8])
        elif part == "scales":
            result[f"{module}.weight_scale"] = tensor.t().contiguous()
        elif part not in ("qzeros", "g_idx"):
            result[name] = tensor
    return result


def compare(python: Path, layout: str, model: Path, tokens: int, versions: set[str]) -> Comparison:
    """Generates with vLLM and scores with Antiphon. Adds vLLM's version to `versions`."""
    with LLM(model=str(model), device="cpu", dtype="bfloat16", kv_cache_memory_gb=0.1) as llm:
        first = llm.generate(list(PROMPTS), SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        prompts = [list(output.prompt_token_ids or ()) for output in first]
        try:
            answer = run_vllm(python, model, prompts, tokens)
        except VllmRefusedError as error:
            return Comparison(layout, refusal=str(error))
        versions.add(answer.version)
        gaps = [gap for pair in zip(prompts, answer.outputs, strict=True) for gap in token_gaps(llm, *pair)]
    return Comparison(layout, len(gaps), gaps.count(0.0), max(gaps, default=0.0))


def token_gaps(llm: LLM, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """Returns the gap of each token of `output`."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    (scored,) = llm.generate([{"prompt_token_ids": [*prompt, *output]}], params, use_tqdm=False)
    assert scored.prompt_logprobs is not None
    gaps: list[float] = []
    for token, entry in zip(output, scored.prompt_logprobs[len(prompt) :], strict=True):
        assert entry is not None
        gaps.append(max(one.logprob for one in entry.values()) - entry[token].logprob)
    return gaps


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of `vllm_greedy.py`: token ids for each prompt."""

    version: str
    outputs: list[list[int]]


class VllmRefusedError(Exception):
    """VLLM did not load a checkpoint; the message has its reason."""


def run_vllm(python: Path, model: Path, prompts: list[list[int]], tokens: int) -> Answer:
    """Returns what `vllm_greedy.py` writes. Raises VllmRefusedError if it ends with an error."""
    with tempfile.TemporaryDirectory(prefix="antiphon-vllm-") as directory:
        request, result = Path(directory, "request.json"), Path(directory, "result.json")
        request.write_text(json.dumps({"prompts": prompts, "max_tokens": tokens}), encoding="utf-8")
        environment = {**os.environ, **vllm_environment(python), "VLLM_CPU_KVCACHE_SPACE": "1"}
        environment.pop("PYTHONPATH", None)
        command = [str(python), str(GREEDY), str(model), str(request), str(result)]
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if not result.exists():
            raise VllmRefusedError(reason(done.stdout + done.stderr))
        return Answer(**json.loads(result.read_text(encoding="utf-8")))


def reason(log: str) -> str:
    """Returns the first error of vLLM's log, or why its kernel for a CPU does not support the layout."""
    kernel = re.search(r"CPU\w*Kernel cannot implement due to: .*", log)
    if kernel:
        return f"{NOT_ON_CPU}: {kernel[0].strip()}"
    error = re.search(r"\w+(?:Error|Exception): .*", log)
    return error[0].strip() if error else log[-500:].strip()


if __name__ == "__main__":
    sys.exit(main())
