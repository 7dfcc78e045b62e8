"""The object that describes a response, as JSON."""

import time
from collections.abc import Mapping
from typing import Any, Literal

from antiphon.services.gateway.apis.openai.answers.answer_encoder import GenerationState
from antiphon.services.gateway.apis.openai.answers.chat_message import arguments_object
from antiphon.services.gateway.apis.openai.request_context import RequestContext
from antiphon.services.gateway.guests.responses import tools
from antiphon.services.gateway.guests.responses.convert import conversation_of
from antiphon.services.gateway.guests.responses.schemas import REASONING, ResponsesBody
from antiphon.services.gateway.guests.responses.text_format import output_format
from antiphon.services.gateway.guests.responses.tools import shown_tools
from antiphon.shared.errors import ServiceError
from antiphon.shared.request.conversation import FunctionCall, ToolCall, Turn

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ID_PREFIX = "resp_"
FINAL: frozenset[Status] = frozenset({"completed", "incomplete", "failed", "cancelled"})
"""Final states of a response."""
_OF_SERVER = ("mcp_call", "mcp_approval_request")
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponseObject:
    """Builds the object of one response in each of its states."""

    def __init__(self, body: ResponsesBody, context: RequestContext, told: tools.Tools | None = None) -> None:
        """`told`: the tools of the response, if they are read already."""
        self.id = context.id
        self.tools = told or tools.Tools(body)
        self.summarizes = (body.reasoning or {}).get("summary") is not None
        self.seals_reasoning = REASONING in (body.include or ())
        self.conversation_id = conversation_of(body)
        self._constant = _constant_fields(body, context)
        if self.conversation_id is not None:
            self._constant["conversation"] = {"id": self.conversation_id}

    def build(
        self,
        status: Status,
        output: list[dict[str, Any]],
        usage: dict[str, Any] | None = None,
        error: ServiceError | None = None,
        reason: str = "max_output_tokens",
    ) -> dict[str, Any]:
        """Returns the object. `usage` and `error` are null unless given. `reason`: why it is incomplete, if it is."""
        return {
            **self._constant,
            "status": status,
            "output": output,
            "usage": usage,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None if error is None else error_object(error),
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
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

    A call that was cut off at the end of the output is left out, and so is reasoning, as between turns of a chat.
    """
    calls = [call for item in items if _is_whole(item) and (call := called(item)) is not None]
    text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    return Turn(role="assistant", content=text, tool_calls=calls or None)


def _is_whole(item: Mapping[str, Any]) -> bool:
    """Whether the model has completed a call. The status of a call that the server makes tells of its result."""
    return item["type"] in _OF_SERVER or item["status"] == "completed"


def called(item: Mapping[str, Any]) -> ToolCall | None:
    """Returns the call of an item as the model made it; None if the item is no call."""
    match item["type"]:
        case "function_call":
            arguments = arguments_object(item["arguments"])
        case "custom_tool_call":
            arguments = {tools.INPUT: item["input"]}
        case "local_shell_call":
            action = item["action"]
            arguments = {"command": action["command"]}
            given = {"workdir": action.get("working_directory"), "timeout_ms": action.get("timeout_ms")}
            arguments |= {name: value for name, value in given.items() if value is not None}
        case "mcp_call" | "mcp_approval_request":
            arguments = arguments_object(item["arguments"])
        case _:
            return None
    name = tools.told_name(item.get("name", "local_shell"), item.get("server_label") or item.get("namespace") or "")
    return ToolCall(id=item.get("call_id") or item["id"], function=FunctionCall(name=name, arguments=arguments))


def result(item: Mapping[str, Any]) -> str:
    """Returns what the model is told of a call that the server has made."""
    if item.get("error") is None:
        return item.get("output") or ""
    return f"Error: {error_text(item['error'])}"


def error_text(error: Any) -> str:
    """Returns the text of the error of an item, in any of its forms."""
    if not isinstance(error, dict):
        return str(error)
    if isinstance(error.get("message"), str):
        return error["message"]
    blocks = error.get("content")
    parts = [str(one.get("text", "")) for one in blocks if isinstance(one, dict)] if isinstance(blocks, list) else []
    return "\n".join(parts)


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
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": {name: (body.reasoning or {}).get(name) for name in ("effort", "summary")},
        "safety_identifier": body.safety_identifier,
        "service_tier": context.request.service_tier or "default",
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {**(body.text or {}), "format": output_format(body.text)},
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": shown_tools(body),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
