"""docs/contributing/clients.md and the integrations are those of the tests' settings and of their last results."""

import json
import re

from tests.clients import results
from tests.clients.agents.agents import AGENTS, Server
from tests.clients.page import PAGE, render

INTEGRATIONS = PAGE.parents[1] / "integrations"
SHOWN = Server("http://localhost:8000", "MODEL", "KEY", 32768)


def test_the_page_of_clients_is_that_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run `python -m tests.clients.page`"


def test_every_agent_did_both_scenarios_and_nothing_failed() -> None:
    rows = results.read()
    assert [row for row in rows if not row.passed] == []
    for agent in AGENTS:
        moved = [row.moves for row in rows if row.client == agent.name]
        assert len(moved) == 2
        assert max(moved) >= 2, "an engine is killed in each of two turns"


def test_the_integrations_show_the_settings_with_which_agents_are_tested() -> None:
    pages = {"Claude Code": "claude-code.md", "Codex": "codex.md", "opencode": "opencode.md"}
    setups = {agent.name: agent.setup(SHOWN) for agent in AGENTS}
    texts = {name: (INTEGRATIONS / page).read_text(encoding="utf-8") for name, page in pages.items()}
    for name, value in setups["Claude Code"].variables.items():
        assert f"{name}={value}" in texts["Claude Code"]
    assert setups["Codex"].text in texts["Codex"]
    [shown] = re.findall(r"^```json\n(.+?)^```", texts["opencode"], re.MULTILINE | re.DOTALL)
    assert json.loads(shown) == json.loads(setups["opencode"].text)
