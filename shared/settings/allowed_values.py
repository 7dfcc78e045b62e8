"""Allowed names and ranges of settings, in addition to those in `shared/flags.py`. Called by `shared/config.py`."""

import json
import re
from typing import Any, cast

from antiphon.shared import limits
from antiphon.shared.flags import Rule
from antiphon.shared.settings.kv_events import kv_events_of
from antiphon.shared.settings.output_formats import (
    NEVER_SHOWN,
    REASONING_ALIASES,
    REASONING_MARKS,
    TOOL_ALIASES,
    TOOL_MARKS,
)

SLEEP_LEVEL = Rule("1 or 2", lambda value: value in (1, 2))
LORA_RANK = Rule("between 1 and 512", lambda value: 1 <= value <= 512)
GPU_KERNEL_FORMS = {
    "plain": ("skinny", "library", "fixed"),
    "quantized": ("tiles", "swapped", "library", "scaled"),
    "experts": ("tiles", "library"),
}
"""The forms that products with weights have on a GPU, by the kind of weight."""


def _are_gpu_kernels(value: str) -> bool:
    if value in ("auto", "measure", "reference"):
        return True
    pairs = [pair.partition("=") for pair in value.split(",")]
    kinds = {kind for kind, _, _ in pairs}
    return len(kinds) == len(pairs) and all(form in GPU_KERNEL_FORMS.get(kind, ()) for kind, _, form in pairs)


GPU_KERNELS = Rule(
    "auto, measure, reference, or plain=skinny|library|fixed, quantized=tiles|swapped|library|scaled, "
    "experts=tiles|library, or several of them with commas",
    _are_gpu_kernels,
)
TEMPERATURE = Rule("between 0 and 2", lambda value: 0 <= value <= 2)
CONV_TEMPLATES = (
    "generate",
    "shennong_chat",
    "llama-3",
    "llama-2",
    "qwen-7b-chat",
    "baichuan2-chat",
    "baichuan-chat",
    "chatglm3",
    "chatglm2",
)
"""The names of conversation templates. Each has a file in `shared/text/templates`, except `shennong_chat`, whose layout
is not public."""
CONV_TEMPLATE = Rule(f"one of {', '.join(CONV_TEMPLATES)}", lambda value: value in ("", *CONV_TEMPLATES))
MODEL_NAME = Rule(
    f"a name of at most {limits.MODEL_NAME_CHARS_MAX} printable characters",
    lambda value: len(value) <= limits.MODEL_NAME_CHARS_MAX and value.isprintable(),
)
MODEL_ALIASES = Rule(
    f"at most {limits.MODEL_ALIASES_MAX} names of at most {limits.MODEL_NAME_CHARS_MAX} printable characters",
    lambda value: value.count(",") < limits.MODEL_ALIASES_MAX and all(map(MODEL_NAME.holds, value.split(","))),
)
USAGE_SINK = Rule(
    "file:PATH or a URL like https://host/path", lambda value: bool(re.match(r"$|file:.|https?://[^/]", value))
)
API_KEYS = Rule(
    "a list with a key: without one everybody could use the server", lambda value: not value or bool(value.strip(" ,"))
)
LOGPROBS = Rule(f"between 0 and {limits.LOGPROBS_MAX}", lambda value: 0 <= value <= limits.LOGPROBS_MAX)


def overrides_of(text: str) -> dict[str, Any] | None:
    """Returns the JSON object in the value of `--hf-overrides`, {} for no text or `none`, None for anything else."""
    try:
        value: Any = {} if text in ("", "none") else json.loads(text)
    except ValueError:
        return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


HF_OVERRIDES = Rule(
    'a JSON object with fields of config.json, such as {"rope_theta": 1000000}',
    lambda text: overrides_of(text) is not None,
)
KV_EVENTS = Rule(
    "a JSON object with some of the fields enable_kv_cache_events, publisher (zmq or null), endpoint, replay_endpoint, "
    "buffer_steps, hwm, max_queue_size, topic",
    lambda text: kv_events_of(text) is not None,
)
TOOL_CALL_PARSERS = ("auto", "none", *TOOL_MARKS, *TOOL_ALIASES)
REASONING_PARSERS = ("auto", "none", *REASONING_MARKS, *REASONING_ALIASES, *NEVER_SHOWN)
