"""Advice for a model that does not fit into memory, with options spelled as flags, variables or arguments.

Called by the engine for the message of a start that fails for lack of memory.
"""

from typing import Literal, cast

from antiphon.shared.config import EngineSettings

Spelling = Literal["flags", "variables", "arguments"]
"""Options of a command line, environment variables of a container, or arguments of the offline API."""
SHORT_CONTEXT = 4096
HIGH_UTILIZATION = 0.95
_NAMES: dict[str, dict[Spelling, str]] = {
    "quantization": {"flags": "--quantization=ifq", "variables": "QUANTIZATION=ifq", "arguments": "quantization='ifq'"},
    "context": {
        "flags": f"--max-model-len={SHORT_CONTEXT}",
        "variables": f"MAX_MODEL_LEN={SHORT_CONTEXT}",
        "arguments": f"max_model_len={SHORT_CONTEXT}",
    },
    "utilization": {
        "flags": f"--gpu-memory-utilization={HIGH_UTILIZATION}",
        "variables": f"GPU_MEMORY_UTILIZATION={HIGH_UTILIZATION}",
        "arguments": f"gpu_memory_utilization={HIGH_UTILIZATION}",
    },
    "eager": {"flags": "--enforce-eager", "variables": "--enforce-eager", "arguments": "enforce_eager=True"},
    "cache": {
        "flags": "a larger --kv-cache-memory-gb",
        "variables": "a larger --kv-cache-memory-gb",
        "arguments": "a larger kv_cache_memory_gb",
    },
    "rows": {
        "flags": "a smaller --max-num-batched-tokens or --max-num-seqs",
        "variables": "a smaller --max-num-batched-tokens or --max-num-seqs",
        "arguments": "a smaller max_num_batched_tokens or max_num_seqs",
    },
}


def measures(settings: EngineSettings, *, on_cpu: bool, context: int | None = None, prepared: bool = False) -> str:
    """Returns a sentence with the measures against lack of memory, without those already in use.

    `context` is the requested context length in tokens, None if it is unknown. `prepared`: whether the model's weights
    are quantized already. Measures that do not apply to the device are left out.
    """
    found = list[str]()
    if settings.execution.quantization in ("", "None", "none") and not prepared:
        found.append("quantization")
    if context is None or context > SHORT_CONTEXT:
        found.append("context")
    if settings.cache.gpu_memory_utilization < HIGH_UTILIZATION:
        found.append("utilization")
    found += ["cache"] if on_cpu else [] if settings.execution.enforce_eager else ["eager"]
    found.append("rows")
    spelling = cast(Spelling, settings.advice_spelling)
    *words, last = [_NAMES[name][spelling] for name in found]
    listed = f"{', '.join(words)} or {last}" if words else last
    return f"Take one of these measures, or several: {listed}."
