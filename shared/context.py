"""Checks that prompt and output together fit into the model's context length.

Called by the tokenizer for prompts given as text, and by the gateway for prompts given as token ids.
"""

from shared.errors import ServiceError


def check_context(num_tokens: int, max_tokens: int, max_model_len: int, param: str, *, generates: bool = True) -> None:
    """Raises ServiceError('context_length_exceeded') if a prompt of `num_tokens` leaves no room for `max_tokens`.

    `max_tokens` 0 means as many tokens as fit, at least one if the request `generates` output. `max_model_len` 0 means
    no check. `param` is the name of the request's field that holds the prompt.
    """
    wanted = max(1, max_tokens) if generates else 0
    if max_model_len <= 0 or num_tokens + wanted <= max_model_len:
        return
    advice = f"Please reduce the length of the {param}."
    if not generates:
        problem = f"your {param} resulted in {num_tokens} tokens"
    elif max_tokens > 0:
        problem = (
            f"you requested {num_tokens + wanted} tokens ({num_tokens} in the {param}, {wanted} in the completion)"
        )
        advice = f"Please reduce the length of the {param} or completion."
    else:
        problem = f"your {param} resulted in {num_tokens} tokens, which leaves no room for a completion"
    message = f"This model's maximum context length is {max_model_len} tokens. However, {problem}. {advice}"
    raise ServiceError("context_length_exceeded", message, param=param)
