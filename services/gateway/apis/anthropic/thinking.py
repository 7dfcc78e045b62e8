"""Reads `thinking` and `output_config` of a message request: whether the model reasons, how the answer shows it. Pure.

The model's template decides how it reasons; after the tokens of a budget the reasoning is ended.
"""

from typing import Any, NamedTuple

from antiphon.services.gateway.apis.anthropic.schemas import CountTokensBody, MessagesBody
from antiphon.services.gateway.apis.openai.bodies.content_blocks import check_fields
from antiphon.services.gateway.edge.access.call import ignore
from antiphon.shared.request.checks import missing, refuse

_FIELDS = frozenset({"type", "display", "budget_tokens"})
_SWITCH = "enable_thinking"
"""Name of the switch in the chat templates of models that can answer with and without reasoning."""
_DISPLAYS = ("summarized", "omitted", "full", None)
_EFFORTS = ("low", "medium", "high", "xhigh")
_HIGHEST = "max"


class Shown(NamedTuple):
    """Whether the answer has blocks of reasoning, and whether they have its text or only its sealed form."""

    has_blocks: bool = False
    has_text: bool = True


def shown(body: CountTokensBody) -> Shown:
    """Returns how the answer shows reasoning: not at all unless the request asks for it. Raises ServiceError."""
    thinking = body.thinking
    if thinking is None:
        return Shown()
    check_fields(thinking, _FIELDS, "thinking")
    kind, display = thinking.get("type"), thinking.get("display", "summarized")
    if kind is None:
        missing("thinking.type")
    if kind not in ("adaptive", "enabled", "disabled"):
        refuse("thinking.type", "must be 'adaptive', 'enabled' or 'disabled'")
    if display is not None and not isinstance(display, str):
        refuse("thinking.display", "must be a text, such as 'summarized' or 'omitted'")
    if display not in _DISPLAYS:
        ignore("thinking.display")  # new clients know ways of showing that are no promise about the answer
    return Shown(kind != "disabled", display != "omitted")


def budget(body: MessagesBody) -> int | None:
    """Returns the largest number of tokens of reasoning; None: no limit. Raises ServiceError."""
    thinking = body.thinking or {}
    tokens = thinking.get("budget_tokens")
    if thinking.get("type") == "disabled" or tokens is None:
        return None
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        refuse("thinking.budget_tokens", "must be an integer of at least 1")
    return tokens


def template_fields(body: CountTokensBody) -> dict[str, Any]:
    """Returns the fields of a chat body that make the model reason, or not. Raises ServiceError."""
    thinking = body.thinking or {}
    switch = {} if "type" not in thinking else {_SWITCH: thinking["type"] != "disabled"}
    return {"chat_template_kwargs": switch or None}


def output_fields(body: MessagesBody) -> dict[str, Any]:
    """Returns effort and format of the answer as fields of a chat body. Raises ServiceError."""
    config = body.output_config or {}
    check_fields(config, ("effort", "format"), "output_config")
    effort = config.get("effort")
    if effort == _HIGHEST:
        effort = _EFFORTS[-1]
    elif effort is not None and effort not in _EFFORTS:
        ignore("output_config.effort")
        effort = None
    wanted = config.get("format")
    param = "output_format" if wanted is None else "output_config.format"
    return {"reasoning_effort": effort, **_format(body.output_format if wanted is None else wanted, param)}


def _format(wanted: Any, param: str) -> dict[str, Any]:
    if wanted is None:
        return {}
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        refuse(f"{param}.type", "must be 'json_schema'")
    check_fields(wanted, ("type", "schema", "name"), param)
    if wanted.get("schema") is None:
        missing(f"{param}.schema")
    named = {"name": "output", "schema": wanted["schema"], "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}
