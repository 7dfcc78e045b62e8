"""Compares the engine's features on the GPU with those on the CPU: offline API, float32, the demo model.

Every case is generated on the CPU by PyTorch's operations, then on the device with each set of options that must not
change the text. Options that change the weights (quantization, an 8-bit cache) need only give complete and valid
results. The part "two cards" has the sets of options that divide the model over two GPUs; it runs by itself only:

    python -m bench.gpu.features "two cards"
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from antiphon.offline.llm import LLM
from antiphon.offline.prompts.guided import GuidedDecodingRequest
from antiphon.offline.sampling_params import SamplingParams
from bench.gpu.parts import DEVICE, Found, Given, compute_parts

DEMO = Path(__file__).resolve().parents[2] / "antiphon" / "demo"
PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["city", "count"],
    "additionalProperties": False,
}
CASES: dict[str, tuple[str, dict[str, Any], GuidedDecodingRequest | None]] = {
    "greedy": ("Tell me a story.", {"temperature": 0.0, "max_tokens": 60}, None),
    "sampled": ("Tell me a story.", {"seed": 5, "top_p": 0.9, "top_k": 40, "top_a": 0.1, "max_tokens": 40}, None),
    "penalties": (
        "Write a verse.",
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2,
         "max_tokens": 40},
        None,
    ),
    "several": ("Say hello.", {"n": 3, "seed": 9, "max_tokens": 20}, None),
    "log probabilities": (
        "What is France's capital?", {"temperature": 0.0, "logprobs": 4, "prompt_logprobs": 2, "max_tokens": 8}, None
    ),
    "beams": (
        "Say hello.", {"use_beam_search": True, "best_of": 3, "n": 2, "temperature": 0.0, "max_tokens": 12}, None
    ),
    "schema": ("Give me a city.", {"temperature": 0.0, "max_tokens": 60}, GuidedDecodingRequest(guided_json=SCHEMA)),
    "expression": (
        "Give me a number.", {"seed": 3, "max_tokens": 30}, GuidedDecodingRequest(guided_regex=r"[0-9]{3}-[0-9]{4}")
    ),
    "choice": (
        "Yes or no?", {"temperature": 0.0, "max_tokens": 10}, GuidedDecodingRequest(guided_choice=["yes", "no"])
    ),
    "long prompt": (
        "Repeat: " + "one two three four five " * 60, {"temperature": 0.0, "min_tokens": 10, "max_tokens": 30}, None
    ),
    "bans": ("Say hello.", {"temperature": 0.0, "min_tokens": 20, "max_tokens": 24}, None),
}  # fmt: skip
EQUAL: dict[str, dict[str, Any]] = {
    "kernels": {},
    "kernels without graphs": {"enforce_eager": True},
    "PyTorch's operations": {"cuda_backend": "torch"},
    "speculation": {"use_lookahead": True, "use_v2_block_manager": True, "num_speculative_tokens": 4},
    "chunks of 64": {"enable_chunked_prefill": True, "max_num_batched_tokens": 64, "max_num_seqs": 8},
    "small cache": {"num_gpu_blocks_override": 130, "swap_space": 0.1},
    "adapter slots": {"enable_lora": True, "max_loras": 2},
}
CHANGED: dict[str, dict[str, Any]] = {
    **{f"--quantization={name}": {"quantization": name} for name in ("ifq", "ifq_w8a8", "ifq_nf4", "fp8")},
    "cache fp8": {"kv_cache_dtype": "fp8", "dtype": "bfloat16"},
    "bfloat16": {"dtype": "bfloat16"},
}
LOGPROB_TOLERANCE = 2e-3


DIVIDED: dict[str, dict[str, Any]] = {
    "heads": {"tensor_parallel_size": 2},
    "heads without graphs": {"tensor_parallel_size": 2, "enforce_eager": True},
    "heads, sums in order": {"tensor_parallel_size": 2, "deterministic": True},
    "heads, adapter slots": {"tensor_parallel_size": 2, "enable_lora": True, "max_loras": 2},
    "heads, PyTorch's operations": {"tensor_parallel_size": 2, "cuda_backend": "torch"},
    "layers": {"pipeline_parallel_size": 2},
}
"""Sets of options that divide a model over two devices and must not change the text."""

TINY_CASES = ("greedy", "several", "choice")


def generate(given: Given, device: str, **options: Any) -> dict[str, Any]:
    """Returns texts and tokens' log probabilities by case. All cases without structured output are one batch."""
    fixed = {"gpu_memory_utilization": 0.9, "max_model_len": 1024, "max_num_seqs": 16, "dtype": "float32"}
    cases = {name: CASES[name] for name in TINY_CASES} if given.tiny else CASES
    found: dict[str, Any] = {}
    with LLM(str(DEMO), device=device, **{**fixed, **options}) as llm:
        plain = [name for name, case in cases.items() if case[2] is None and name != "beams"]
        texts = [PROMPT.format(cases[name][0]) for name in plain]
        outputs = llm.generate(texts, [SamplingParams(**cases[name][1]) for name in plain], use_tqdm=False)
        found |= {name: _summary(output) for name, output in zip(plain, outputs, strict=True)}
        for name, (text, params, guided) in cases.items():
            if name not in found:
                asked = SamplingParams(**params)
                [output] = llm.generate(PROMPT.format(text), asked, use_tqdm=False, guided_options_request=guided)
                found[name] = _summary(output)
    return found


def _summary(output: Any) -> Any:
    error = getattr(output, "error_msg", None)
    if error:
        return {"error": error}
    texts = [each.text for each in output.outputs]
    places = [place for each in output.outputs for place in each.logprobs or () if place]
    chances = [next(iter(place.values())).logprob for place in places]
    return {"texts": texts, "logprobs": chances}


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the cases whose texts or log probabilities differ, with both texts."""
    found = {}
    for name, one in ours.items():
        other = theirs[name]
        if one.get("texts") != other.get("texts") or "error" in one:
            found[name] = {"ours": one, "theirs": other}
            continue
        pairs = zip(one["logprobs"], other["logprobs"], strict=True)
        furthest = max((abs(a - b) for a, b in pairs), default=0.0)
        if not furthest <= LOGPROB_TOLERANCE:
            found[name] = {"log probability differs by": furthest}
    return found


def invalid(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the cases with an error, an empty text, or a structure that was not kept."""
    wrong = {name: one for name, one in found.items() if "error" in one or not all(one["texts"])}
    if "schema" in found:
        try:
            json.loads(found["schema"]["texts"][0])
        except (ValueError, KeyError):
            wrong["schema"] = found["schema"]
    if found["choice"].get("texts") not in (["yes"], ["no"]):
        wrong["choice"] = found["choice"]
    return wrong


def attempt(given: Given, options: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> Any:
    """Returns the cases that fail with one set of options (empty if none does), or the error that ended the run."""
    try:
        found = generate(given, DEVICE.type, **options)
    except Exception as error:
        # Reported, so that the other sets of options are checked as well.
        return {"failed": f"{type(error).__name__}: {error}"[-1500:]}
    return invalid(found) if theirs is None else differences(found, theirs)


def features(given: Given) -> Found:
    """Returns by set of options the cases that fail."""
    equal, changed = EQUAL, CHANGED
    if given.tiny:
        # The kernels would take minutes under the interpreter.
        equal, changed = {"default": {}}, {"--quantization=ifq": CHANGED["--quantization=ifq"]}
    expected = generate(given, "cpu", cpu_backend="torch")
    found = {name: attempt(given, flags, expected) for name, flags in equal.items()}
    found |= {name: attempt(given, flags, None) for name, flags in changed.items()}
    return {**found, "wrong": [name for name, each in found.items() if each]}


def two_cards(given: Given) -> Found:
    """Returns the same for the sets of options that divide the model."""
    expected = generate(given, "cpu", cpu_backend="torch")
    found = {name: attempt(given, flags, expected) for name, flags in DIVIDED.items()}
    return {**found, "wrong": [name for name, each in found.items() if each]}


PARTS = {"features": features, "two cards": two_cards}

if __name__ == "__main__":
    compute_parts(PARTS)
