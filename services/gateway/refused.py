"""Parameters that exist elsewhere and not here yet: refused by name, so that nobody believes they had an effect.

A value that asks for nothing (null, false, an empty list, …) passes. Fields that are listed nowhere are ignored.
"""

from typing import Any

import msgspec

from services.gateway.openai_api import RawFields, read_any
from shared.errors import ServiceError

_OFF: tuple[Any, ...] = (None, False)
_EMPTY: tuple[Any, ...] = (None, [], {}, "")
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "suffix": _EMPTY,
    "use_beam_search": _OFF,
    "length_penalty": (None, 1),
    "early_stopping": _OFF,
    "structured_outputs": _EMPTY,
    "response_format": (None, {"type": "text"}),
    "tools": _EMPTY,
    "tool_choice": (None, "none"),
    "functions": _EMPTY,
    "function_call": (None, "none"),
    "logit_bias": _EMPTY,
    "allowed_token_ids": (None,),
    "bad_words": _EMPTY,
    "logits_processors": _EMPTY,
    "prompt_logprobs": (None, False),
    "return_tokens_as_token_ids": _OFF,
    "eos_token_ids": _EMPTY,
    "truncate_prompt_tokens": (None,),
    "audio": (None,),
    "modalities": (None, [], ["text"]),
    "web_search_options": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": _EMPTY,
    "continue_final_message": _OFF,
    "documents": _EMPTY,
    "multi_modal_inputs": _EMPTY,
    "mm_processor_kwargs": _EMPTY,
    "prompt_embeds": (None,),
    "kv_transfer_params": _EMPTY,
}
_PREFIXES = ("guided_", "beam_")
_NOTHING: msgspec.Raw = msgspec.Raw(b"null")


def check(fields: RawFields) -> None:
    """Raises ServiceError('unsupported_parameter') for the first field that asks for something we cannot do."""
    for name, raw in fields.items():
        if name in _HARMLESS:
            _check_one(name, raw, _HARMLESS[name])
        elif name.startswith(_PREFIXES):
            _check_one(name, raw, _OFF)


def _check_one(name: str, raw: msgspec.Raw, harmless: tuple[Any, ...]) -> None:
    if raw == _NOTHING:
        return
    value = read_any(raw)
    if any(_same(value, other) for other in harmless):
        return
    raise ServiceError("unsupported_parameter", f"The parameter '{name}' is not supported yet.", param=name)


def _same(value: Any, other: Any) -> bool:
    # False == 0 and True == 1 in Python, but not in JSON.
    return isinstance(value, bool) == isinstance(other, bool) and value == other
