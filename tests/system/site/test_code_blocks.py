"""Every block of code in the pages for users runs as it stands, or says why not, and then names only what exists.

Shell code runs in a folder of its page, in the order of the page. A block that is nothing but `antiphon serve …` starts
this server, and the following blocks of the page ask it; before the first one they ask the server of the demo model.
"""

import contextlib
import functools
import io
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from antiphon.shared.security.api_keys import keys_of_text
from tests.system.served import Served, fetch
from tests.system.site.blocks import PAGES, ROOT, Block, blocks_of, commands
from tests.system.site.world import World, addressed

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.model, pytest.mark.timeout(240)]
DEMO: tuple[str, ...] = ()
SEVERAL = ("--engines", "2", "--gateways", "2")
"""Flags of a server that several pages start."""
MARKED_AT_MOST = 0.25
"""Share of the blocks that need not run."""
_OWN = re.compile(r"https?://(?:localhost|127\.0\.0\.1):8000(?P<path>/[^\s\"']*)?")
_FILE = re.compile(r"\b(?:infra|examples|bench)/[\w./-]+|docker-compose\.yml")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("site"))
    with world.keeping():
        yield world


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_the_blocks_of_a_page_run(page: Path, world: World) -> None:
    folder, served = world.folder(page), None
    with world.keeping(DEMO, SEVERAL):
        for block in blocks_of(page):
            if block.mark:
                continue
            if block.server:
                served = world.server(block.server, folder)
                assert fetch(served, "GET", "/readyz").status == 200
            else:
                served = served or world.server(DEMO, folder)
                _run(block, world, served, folder)


def test_few_blocks_do_not_run() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page)]
    marked = [block for block in blocks if block.mark]
    assert len(blocks) > 100
    assert len(marked) <= MARKED_AT_MOST * len(blocks), [f"{block.where}: {block.mark}" for block in marked]


def test_every_guide_begins_with_a_command() -> None:
    guides = [page for page in PAGES if page.parent.name == "guides"]
    assert [page.name for page in guides if blocks_of(page)[0].language not in ("sh", "python")] == []


@pytest.mark.parametrize(
    "block", [block for page in PAGES for block in blocks_of(page) if block.mark], ids=lambda block: block.where
)
def test_a_block_that_does_not_run_names_only_what_exists(block: Block) -> None:
    if block.language == "python":
        compile(block.text, block.where, "exec")
        _check_imports(block)
        return
    assert block.language == "sh"
    assert [name for name in _FILE.findall(block.text) if not (ROOT / name).exists()] == []
    for program, *words in commands(block.text):
        if program == "antiphon":
            flags = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert flags <= _flags(tuple(words[: 2 if words[0] == "service" else 1])), block.where
        elif program == "make":
            assert words[0] in _targets(), block.where


def _run(block: Block, world: World, served: Served, folder: Path) -> None:
    if block.language == "sh":
        done = world.shell(block.text, served, folder)
        assert done.returncode == 0, f"{block.where}\n{done.stdout}\n{done.stderr}\n{served.output[-2000:]}"
    elif block.language == "python":
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(addressed(block.text, served), block.where, "exec"), {"__name__": "__main__"})
        assert printed.getvalue().strip(), block.where
    else:
        _check_settings(block)


def _check_settings(block: Block) -> None:
    """A file of settings can be read; what it says about this server is so."""
    value: Any = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}[block.language](block.text)
    assert value, block.where
    assert {found["path"] or "" for found in _OWN.finditer(block.text)} <= {"", "/v1"}, block.where
    if block.language == "toml" and "models" in value:
        named = {f"--{name}" for model in value["models"] for name in model}
        assert named <= _flags(("serve",)) | {"--model"}, block.where
    if block.language == "toml" and "keys" in value:
        keys_of_text(block.text, is_json=False, source=block.where)


def _check_imports(block: Block) -> None:
    """Whatever is imported comes with the project, or is a package of the clients' tests."""
    packages = (ROOT / "tests/clients/requirements.txt").read_text(encoding="utf-8")
    needed = re.match(r"needs the package (\S+)", block.mark)
    assert needed is None or f"{needed[1]}==" in packages, block.where


@functools.cache
def _flags(command: tuple[str, ...]) -> set[str]:
    """The flags of a command of `antiphon`, from its help."""
    about = "--help" if command[0] == "service" else "--help=all"
    argv = [sys.executable, "-m", "antiphon", *command, about]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return {*re.findall(r"--[a-z][\w-]*", done.stdout)}


@functools.cache
def _targets() -> set[str]:
    return {*re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)}
