"""Runs the checks of one client and prints their outcomes as one JSON object: `python -m tests.clients.checks MODULE…`.

A check is one call of the client, named after what is expected of it. It passes if it returns. A call that the server
refuses on purpose is answered: it ends with a client error, and docs/reference/apis.md says what to use in its place.
This module also has what the checks ask for. It knows nothing of the product; `test_clients` runs it in the clients'
own environment, with the server's URL and key in its own.
"""

import asyncio
import importlib
import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

URL, KEY = os.environ.get("ANTIPHON_URL", ""), os.environ.get("ANTIPHON_KEY", "")
HOST = URL.removesuffix("/v1")
SLOW_KEY = "a key with one request a minute"
MODEL, EYE, THINKER = "antiphon-demo", "eye", "thinker"
"""The demo model; a random one that takes images; one that writes its reasoning first."""
ASK, ANSWER = "What is 12 + 7?", "12 + 7 = 19."
QUESTION: list[Any] = [{"role": "user", "content": ASK}]
STORY: list[Any] = [{"role": "user", "content": "Tell me a story"}]
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": PARAMETERS}}
IMAGE = (
    "iVBORw0KGgoAAAANSUhEUgAAABwAAAAcCAIAAAD9b0jDAAAAJElEQVR42mM4oaFBdcQwauiooaOGjho6auiooaOGjho6MgwFAOX4Wa7Kt0cTAAAA"
    "AElFTkSuQmCC"
)
"""A red square as PNG in base64."""
_REFUSED = "refused"
Check = Callable[[], Any]


class Answer(BaseModel, extra="forbid"):
    """What the model is asked for."""

    kind: bool
    mood: Literal["good", "bad"]


def check(call: Check) -> Check:
    """Marks a call that succeeds."""
    setattr(call, _REFUSED, ("", ""))
    return call


def refused(documented: str, told: str) -> Callable[[Check], Check]:
    """Marks a call that ends with a client error. `documented`: words of docs/reference/apis.md; `told`: of it."""

    def mark(call: Check) -> Check:
        setattr(call, _REFUSED, (documented, told))
        return call

    return mark


def status_of(error: Exception) -> int:
    """Returns the HTTP status that a client's exception tells; 0 if it tells none."""
    return getattr(error, "status_code", 0)


def raised(kind: type[Exception], call: Check) -> Any:
    """Returns the exception of this kind that the call raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def _outcome(call: Check, loop: asyncio.Runner) -> dict[str, Any]:
    documented, told = getattr(call, _REFUSED)
    try:
        loop.run(call()) if inspect.iscoroutinefunction(call) else call()
    except Exception as error:
        if documented and 400 <= status_of(error) < 500 and told in str(error):
            return {"answered": documented}
        return {"failed": f"{type(error).__name__}: {error}"[:2000]}
    return {"failed": "was not refused"} if documented else {"passed": True}


def main(modules: list[str]) -> None:
    outcomes = {}
    # One event loop for all: asynchronous clients keep their connections.
    with asyncio.Runner() as loop:
        for module in modules:
            part, calls = module.rpartition(".")[2], vars(importlib.import_module(module)).items()
            for name, call in [one for one in calls if hasattr(one[1], _REFUSED)]:
                started = time.monotonic()
                outcome = _outcome(call, loop)
                outcomes[f"{part}.{name}"] = {**outcome, "seconds": round(time.monotonic() - started, 1)}
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1:])
