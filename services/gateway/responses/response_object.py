"""The object that describes a response, as JSON. Pure."""

from typing import Any, Literal

from services.gateway.openai.answers.answer_encoder import GenerationState
from services.gateway.openai.answers.chat_message import arguments_object
from services.gateway.openai.request_context import RequestContext
from services.gateway.responses.schemas import ResponsesBody
from services.gateway.responses.text_format import output_format
from services.gateway.responses.tools import shown_tools
from shared.errors import ServiceError
from shared.request.conversation import FunctionCall, ToolCall, Turn

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ID_PREFIX = "resp_"
FINAL: frozenset[Status] = frozenset({"completed", "incomplete", "failed", "cancelled"})
"""Final states of a response."""
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponseObject:
    """Builds the object of one response in each of its states."""

    def __init__(self, body: ResponsesBody, context: RequestContext) -> None:
        self.id = context.id
        self._constant = _constant_fields(body, context)

    def build(
        self,
        status: Status,
        output: list[dict[str, Any]],
        usage: dict[str, Any] | None = None,
        error: ServiceError | None = None,
    ) -> dict[str, Any]:
        """Returns the object. `usage` and `error` are null unless given."""
        return {
            **self._constant,
            "status": status,
            "output": output,
            "usage": usage,
            "error": None if error is None else error_object(error),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        }


def usage(state: GenerationState) -> dict[str, Any]:
    """Returns the token counts in the format of the Responses API."""
    counts = state.accumulator.usage(state.num_prompt_tokens)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
    }


def output_turn(items: list[dict[str, Any]]) -> Turn:
    """Returns output items as a turn of the conversation that another response may continue.

    A call that was cut off at the end of the output is left out.
    """
    calls = [
        ToolCall(
            id=item["call_id"],
            function=FunctionCall(name=item["name"], arguments=arguments_object(item["arguments"])),
        )
        for item in items
        if item["type"] == "function_call" and item["status"] == "completed"
    ]
    text = "".join(part["text"] for item in items for part in item.get("content", ()))
    return Turn(role="assistant", content=text, tool_calls=calls or None)


def error_object(error: ServiceError) -> dict[str, str]:
    """Returns a failure in the form of the field `error`."""
    return {"code": _ERROR_CODES.get(error.status, "server_error"), "message": error.message}


def _constant_fields(body: ResponsesBody, context: RequestContext) -> dict[str, Any]:
    params = context.request.params
    return {
        "id": context.id,
        "object": "response",
        "created_at": context.arrival.created,
        "model": context.card.name,
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": context.request.service_tier or "default",
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {"format": output_format(body.text)},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": shown_tools(body),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
