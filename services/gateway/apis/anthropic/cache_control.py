"""Marks for prompt caching: how long the KV of a prompt is to be kept. Pure.

A mark, `{"type": "ephemeral", "ttl": "5m" | "1h"}`, is a member of the body, of a tool or of a content block. The whole
prompt is kept as long as the longest mark asks. Prefixes are cached without marks too, as long as there is room.
"""

from collections.abc import Iterator
from typing import Any

from antiphon.services.gateway.apis.anthropic.schemas import MessagesBody
from antiphon.services.gateway.apis.openai.request_context import RequestContext
from antiphon.services.gateway.edge.access.call import ignore
from antiphon.shared import limits

NAME = "cache_control"
_SECONDS = {"5m": 300.0, "1h": 3600.0}
_USUAL = "5m"


def taken(body: MessagesBody, *, keeps_kv: bool) -> float:
    """Removes the marks that act from a body. Returns how long its prompt is to be kept, seconds; 0: it has no mark.

    Marks of another form, and all where the model's engines have no disk (`keeps_kv`), stay: they are told as hints.
    """
    longest = 0.0
    if body.cache_control:
        longest = _seconds(body.cache_control) if keeps_kv else 0.0
        if not longest:
            ignore(NAME)
    for block in _marked(body) if keeps_kv else ():
        if seconds := _seconds(block[NAME]):
            longest = max(longest, seconds)
            del block[NAME]
    return longest


def num_created(context: RequestContext, num_prompt_tokens: int, num_cached: int) -> int:
    """Returns the number of prompt tokens that are kept from this request on: of a marked prompt, its full blocks."""
    block_size = context.card.kept_block_size
    if not context.request.kv_keep_s or num_prompt_tokens <= limits.KV_TIER_TOKENS_MIN:
        return 0
    return max(0, num_prompt_tokens // block_size * block_size - num_cached)


def _seconds(mark: Any) -> float:
    """Returns how long a mark asks for; 0 if it has another form."""
    if not isinstance(mark, dict) or mark.get("type") != "ephemeral":
        return 0.0
    ttl = mark.get("ttl", _USUAL)
    return _SECONDS.get(ttl, 0.0) if isinstance(ttl, str) else 0.0


def _marked(body: MessagesBody) -> Iterator[dict[str, Any]]:
    """Yields the tools and content blocks with a mark, also those within results of tools."""
    contents = [body.tools, body.system, *(message.content for message in body.messages or ())]
    for content in contents:
        for block in content if isinstance(content, list) else ():
            within = block.get("content")
            for each in (block, *(within if isinstance(within, list) else ())):
                if isinstance(each, dict) and each.get(NAME):
                    yield each
