from typing import Any

import pytest

from tests.unit.gateway.bodies import chat, completion, refusal

ASKED = {
    "suffix": "}",
    "use_beam_search": True,
    "length_penalty": 0.8,
    "early_stopping": True,
    "structured_outputs": {"json": {}},
    "response_format": {"type": "json_object"},
    "tools": [{"type": "function"}],
    "tool_choice": "auto",
    "functions": [{}],
    "function_call": "auto",
    "logit_bias": {"50": 1},
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "logits_processors": ["x"],
    "prompt_logprobs": 0,
    "return_tokens_as_token_ids": True,
    "eos_token_ids": [1],
    "truncate_prompt_tokens": 5,
    "audio": {"voice": "x"},
    "modalities": ["text", "audio"],
    "web_search_options": {},
    "chat_template": "{{ x }}",
    "chat_template_kwargs": {"a": 1},
    "continue_final_message": True,
    "documents": [{}],
    "multi_modal_inputs": {"image": "x"},
    "mm_processor_kwargs": {"a": 1},
    "prompt_embeds": "AAAA",
    "kv_transfer_params": {"a": 1},
    "guided_json": {"type": "object"},
    "guided_regex": "a*",
    "guided_choice": ["a"],
    "guided_jason": {},
    "beam_width": 4,
}
HARMLESS = {
    "suffix": "",
    "use_beam_search": False,
    "length_penalty": 1.0,
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "logit_bias": {},
    "modalities": ["text"],
    "prompt_logprobs": False,
    "guided_json": None,
}


@pytest.mark.spec("S-API-028")
@pytest.mark.parametrize("read", [completion, chat])
@pytest.mark.parametrize(("name", "value"), ASKED.items())
def test_what_is_not_supported_is_refused_by_name(read: Any, name: str, value: Any):
    error = refusal(read, "unsupported_parameter", name, **{name: value})
    assert "not supported yet" in error.message


@pytest.mark.parametrize(("name", "value"), [*HARMLESS.items(), *((name, None) for name in ASKED)])
def test_values_that_ask_for_nothing_pass(name: str, value: Any):
    chat(**{name: value})
