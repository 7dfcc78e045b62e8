"""The items of tools that the server runs, and the conversation that the output of a response forms. Pure.

A response with such tools has several model steps. The ids of the calls of a step have its number, so that the output
alone tells which items belong to the same turn of the model. Step 0 has the calls that a client has approved: the model
made them in an earlier response.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from antiphon.services.gateway.guests.responses.response_object import output_turn, result
from antiphon.shared.request.conversation import Turn

Item = dict[str, Any]
CALL, LIST, ASKED, ANSWERED = "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"
UNKNOWN = "tool_result_unknown"
"""Why a response is incomplete if a call was sent and its result is lost."""
_OF_SERVER = (CALL, ASKED)


def item_id(kind: str, request_id: str, step: int, number: int) -> str:
    """Returns the id of a call, or of the question whether it may be made. `number`: of the item in the output."""
    return f"{'mcp' if kind == CALL else 'mcpr'}_{request_id}_{step}_{number}"


def step_of(item: Item) -> int:
    """Returns the number of the model step that has made a call."""
    return int(item["id"].rsplit("_", 2)[1])


def steps(output: Iterable[Item]) -> list[list[Item]]:
    """Returns the items of each model step that has any, in order. Lists of tools belong to none."""
    found: list[list[Item]] = []
    calls_of: int | None = None
    """The step of the latest item if this is a call of the server's: only more of them can belong to the step."""
    for item in output:
        if item["type"] == LIST:
            continue
        step = step_of(item) if item["type"] in _OF_SERVER else None
        if not found or (calls_of is not None and step != calls_of):
            found.append([])
        found[-1].append(item)
        calls_of = step
    return found


def conversation(turns: Sequence[Turn], output: Iterable[Item]) -> list[Turn]:
    """Returns the turns before a response and those of its output, with the results of the tools."""
    parts = steps(output)
    approved = {item["approval_request_id"]: result(item) for part in parts for item in part if _is_approved(item)}
    found = [
        msgspec.structs.replace(turn, content=approved[turn.tool_call_id]) if turn.tool_call_id in approved else turn
        for turn in turns
    ]
    for part in parts:
        if made := [item for item in part if not _is_approved(item)]:
            found.append(output_turn(made))
            found += [_result_turn(item) for item in made if item["type"] == CALL and item["status"] in _KNOWN]
    return found


_KNOWN = ("completed", "failed")


def approved_ids(items: Iterable[Item]) -> list[str]:
    """Returns the ids of the calls that the input approves and that have not been made, in order."""
    given = list(items)
    made = {item.get("approval_request_id") for item in given if item["type"] == CALL}
    ids = [item["approval_request_id"] for item in given if item["type"] == ANSWERED and item["approve"]]
    return [one for one in dict.fromkeys(ids) if one not in made]


def _is_approved(item: Item) -> bool:
    return item["type"] == CALL and item.get("approval_request_id") is not None


def _result_turn(item: Item) -> Turn:
    return Turn(role="tool", tool_call_id=item["id"], content=result(item))
