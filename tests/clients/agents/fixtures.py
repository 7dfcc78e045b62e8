"""Makes fixtures of recorded requests: their form is kept, what others have written in them is not.

Kept are fields, roles, types, names of tools, and schemas except for their descriptions. Prose is replaced by a
sentence of our own; identifiers and paths by others. `tests/integration/test_agent_requests.py` sends the fixtures.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.clients.agents.agents import Agent
from tests.clients.agents.recorder import Exchange
from tests.support.agent_script import CONTENT, SUM, question

DIRECTORY = Path(__file__).parents[2] / "integration" / "agent_requests"
WORK, NOTES = "/project", "/project/notes.txt"
FILLER = "This sentence stands for a text of the client. "
LONGEST = 60
"""Characters of a text that is kept, unless it describes something."""
_OWN = (CONTENT, SUM, question(NOTES))
_HEADERS = ("user-agent", "accept", "content-type", "anthropic-version", "anthropic-beta", "x-app", "originator")
_PROSE = frozenset({"description", "title", "instructions"})
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{64}")


def write(agent: Agent, version: str, exchanges: Sequence[Exchange], directory: Path) -> None:
    """Writes the fixture of an agent's requests. It worked in the directory `work` of `directory`."""
    requests = [reduced(one, directory) for one in exchanges if one.body]
    told = {"agent": agent.name, "version": version, "api": agent.api, "requests": requests}
    DIRECTORY.mkdir(exist_ok=True)
    text = json.dumps(told, indent=1, ensure_ascii=False)
    (DIRECTORY / f"{agent.program}.json").write_text(f"{text}\n")


def reduced(exchange: Exchange, directory: Path) -> dict[str, Any]:
    """Returns one request with what is not ours replaced."""
    text = exchange.body.decode().replace(f"{directory}/project", WORK).replace(f"{directory}/home", "/home/user")
    headers = {name: value for name, value in exchange.headers.items() if name in _HEADERS}
    return {
        "method": exchange.method,
        "path": exchange.path,
        "headers": headers,
        "body": _reduced(json.loads(_ID.sub(_same_length, text))),
    }


def _same_length(found: re.Match[str]) -> str:
    return re.sub(r"[0-9a-f]", "0", found[0])


def _reduced(value: Any, name: str = "", *, in_schema: bool = False) -> Any:
    if isinstance(value, dict):
        inside = in_schema or name in ("parameters", "input_schema")
        # In `properties`, the names are those of arguments.
        return {
            key: _reduced(one, "" if name == "properties" and inside else key, in_schema=inside)
            for key, one in value.items()
        }
    if isinstance(value, list):
        return [_reduced(one, name, in_schema=in_schema) for one in value]
    if not isinstance(value, str):
        return value
    return _text(value, described=name in _PROSE, in_schema=in_schema)


def _text(text: str, *, described: bool, in_schema: bool) -> str:
    if not described and (in_schema or len(text) <= LONGEST):
        return text
    kept = [one for one in _OWN if one in text]
    if kept and len(text) < 4 * LONGEST:
        return text
    return FILLER * (1 if described else min(4, 1 + len(text) // 1000)) + " ".join(kept)
