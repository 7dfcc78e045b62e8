"""docs/contributing/clients.md is that of the tests' settings and of their last results."""

from tests.clients import results
from tests.clients.agents.agents import AGENTS
from tests.clients.page import PAGE, render


def test_the_page_of_clients_is_that_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run `python -m tests.clients.page`"


def test_every_agent_did_both_scenarios_and_nothing_failed() -> None:
    rows = results.read()
    assert [row for row in rows if not row.passed] == []
    for agent in AGENTS:
        moved = [row.moves for row in rows if row.client == agent.name]
        assert len(moved) == 2
        assert max(moved) >= 2, "an engine is killed in each of two turns"
