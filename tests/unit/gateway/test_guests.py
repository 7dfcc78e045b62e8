"""Guests of the gateway and its APIs stand beside the path: without the folder of one, everything else works."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
GATEWAY = ROOT / "services/gateway"
GUESTS = GATEWAY / "guests"
KNOWN_BY_NAME = {"batches", "files", "images", "replay", "responses", "resume"}
"""Guests that `service` and `app` still make themselves, for their stores and endpoints."""
FREE = sorted({path.name for path in GUESTS.iterdir() if (path / "__init__.py").exists()} - KNOWN_BY_NAME)
APIS = ("anthropic", "native", "ollama")
"""All but OpenAI's, in whose terms the others are written."""
FOLDERS = [*(f"guests.{name}" for name in FREE), *(f"apis.{name}" for name in APIS)]


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, and what it imports from them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)


@pytest.mark.parametrize("name", FOLDERS)
def test_nobody_imports_a_guest_or_an_api_but_itself(name: str):
    own = GATEWAY / name.replace(".", "/")
    found = [
        path
        for folder in ("services", "shared", "antiphon")
        for path in (ROOT / folder).rglob("*.py")
        if own not in path.parents
        and any((module + ".").startswith(f"services.gateway.{name}.") for module in imported(path))
    ]
    assert not found


@pytest.mark.parametrize("name", FOLDERS)
def test_without_its_folder_requests_are_served(name: str, tmp_path: Path):
    for folder in ("shared", "antiphon", "tests", "infra", "pyproject.toml"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "services").mkdir()
    for part in (ROOT / "services").iterdir():
        if part.name != "gateway":
            (tmp_path / "services" / part.name).symlink_to(part)
    shutil.copytree(ROOT / "services/gateway", tmp_path / "services/gateway")
    shutil.rmtree(tmp_path / "services/gateway" / name.replace(".", "/"))
    tests = ["tests/sim/test_flow.py", "tests/unit/gateway/test_actor.py", "tests/integration/test_conversations.py"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]


def test_those_that_are_known_by_name_are_guests_too():
    assert all((GUESTS / name / "__init__.py").exists() for name in KNOWN_BY_NAME)
