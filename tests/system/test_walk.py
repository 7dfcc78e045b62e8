"""One plain streamed chat runs no more files and functions than ARCHITECTURE.md says; counted in a real server."""

from pathlib import Path

import pytest

from infra.walk import page
from infra.walk.__main__ import listed, measured
from infra.walk.figures import WHOLE, Figures, figures
from infra.walk.processes import traced_server

pytestmark = [pytest.mark.system, pytest.mark.nats]
REQUESTS = 6
SPARE_FILES, SPARE_FUNCTIONS = 1, 5
"""So many more pass: timers look at a request that takes long (the engine's `watchdog`, a gateway's `progress_watch`),
and tokens that arrive one by one are written by other functions than tokens that arrive together."""
SHARE_MIN = 0.8
"""Of the committed functions; with fewer, the page tells of a way that is no longer that long."""


def test_a_chat_runs_no_more_files_and_functions_than_the_page_says(tmp_path: Path) -> None:
    with traced_server() as server:
        found = measured(server, REQUESTS, share_min=1.0)
    (tmp_path / "walk").write_text("\n".join(listed(found)))
    now, told = figures(found), page.committed()
    assert set(now) == set(told)
    processes = set(told) - {WHOLE}
    longer = {name: (told[name], now[name]) for name in processes if _is_longer(now[name], told[name])}
    shorter = {name: (told[name], now[name]) for name in processes if _is_shorter(now[name], told[name])}
    assert not longer, f"{longer}: compare {tmp_path}/walk with `make walk ARGS=--list` of the version before"
    assert not shorter, f"{shorter}: run `make walk ARGS=--write`"


def _is_longer(now: Figures, told: Figures) -> bool:
    return now.files > told.files + SPARE_FILES or now.functions > told.functions + SPARE_FUNCTIONS


def _is_shorter(now: Figures, told: Figures) -> bool:
    return now.functions < SHARE_MIN * told.functions
