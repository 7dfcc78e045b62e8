"""A system and a browser for the tests of the console."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.console.browser import Browser, find_chromium
from tests.system.served import Served, until_the_end


def _chromium() -> str:
    binary = find_chromium()
    if binary is None and not os.environ.get("CI"):
        pytest.skip("no Chromium here (Debian: apt-get install chromium-headless-shell)")
    assert binary is not None, "no Chromium: .ci/run installs Debian's chromium-headless-shell"
    return binary


@pytest.fixture(scope="package")
def console() -> Iterator[Served]:
    """A system with the demo model and two engines of two places, which keeps what requests need to run again."""
    _chromium()
    with until_the_end(Served("--engines=2", "--max-num-seqs=2", "--record-content-mb=8")) as started:
        yield started


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    started = Browser(_chromium(), tmp_path / "profile")
    try:
        yield started
        assert started.errors == [], "the page's own errors, and violations of its security policy"
    finally:
        started.close()
