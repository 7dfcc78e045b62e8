"""Pages of lists in the format of OpenAI's API, and the query parameters of the endpoints that list something. Pure."""

from collections.abc import Collection, Sequence
from typing import Any

from starlette.requests import Request

from antiphon.shared.errors import ServiceError
from antiphon.shared.request.checks import refuse

PAGE_MAX = 100
"""Maximum number of objects in one page, if the endpoint sets no other one, as in OpenAI's API."""


def page(
    objects: Sequence[dict[str, Any]], *, limit: int, order: str, after: str | None, most: int = PAGE_MAX
) -> dict[str, Any]:
    """Returns a page of `objects`, which are from the oldest to the newest and have the field `id`.

    `limit`: number of objects, at most `most`. `order`: `asc` or `desc` (newest first). `after`: id of the object after
    which the page begins. Raises ServiceError for a value that is out of range, and for an unknown object.
    """
    if not 1 <= limit <= most:
        refuse("limit", f"must be between 1 and {most}")
    if order not in ("asc", "desc"):
        refuse("order", "must be 'asc' or 'desc'")
    ordered = list(objects) if order == "asc" else list(reversed(objects))
    first = 0
    if after is not None:
        ids = [one["id"] for one in ordered]
        if after not in ids:
            refuse("after", f"names the object '{after}', which is not in the list")
        first = ids.index(after) + 1
    found = ordered[first : first + limit]
    return {
        "object": "list",
        "data": found,
        "first_id": found[0]["id"] if found else None,
        "last_id": found[-1]["id"] if found else None,
        "has_more": first + limit < len(ordered),
    }


def check_query(request: Request, known: Collection[str]) -> None:
    """Raises ServiceError for a query parameter that the endpoint does not have, so that none is ignored."""
    for name in request.query_params:
        if name not in known:
            raise ServiceError("unsupported_parameter", f"Unknown query parameter '{name}'.", param=name)
