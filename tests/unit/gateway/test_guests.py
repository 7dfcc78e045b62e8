"""Guests of the gateway and its APIs stand beside the path: without the folder of one, everything else works."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.slow import slow_but

ROOT = Path(__file__).resolve().parents[3]
GATEWAY = ROOT / "services/gateway"
GUESTS = sorted(path.parent.name for path in (GATEWAY / "guests").glob("*/__init__.py"))
NEEDS = {name: getattr(import_module(f"antiphon.services.gateway.guests.{name}"), "NEEDS", ()) for name in GUESTS}
APIS = ("anthropic", "native", "ollama")
"""All but OpenAI's, in whose terms the others are written."""
FOLDERS = [*(f"guests.{name}" for name in GUESTS), *(f"apis.{name}" for name in APIS)]
STILL = (
    "tests/unit/gateway/test_actor.py",
    "tests/integration/test_openai_client.py",
    "tests/integration/test_gateway_alone.py",
    "tests/sim/test_flow.py::test_more_urgent_requests_go_first",
)
"""What works without any of them: the gateway's actor, its edge, the process, and its part in a simulated system."""
ALSO = "tests/integration/test_responses_client.py::test_a_background_response_runs_without_its_client"
"""What works without any other than the responses, which use several guests."""


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, and what it imports from them, each with a dot behind it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (f"{one.name}." for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{one.name}." for one in node.names)


@pytest.fixture(scope="module")
def product() -> dict[Path, set[str]]:
    """What each file of the product imports."""
    paths = [path for folder in ("services", "shared", "antiphon") for path in (ROOT / folder).rglob("*.py")]
    return {path: set(imported(path)) for path in paths}


@pytest.mark.parametrize("name", FOLDERS)
def test_nobody_imports_a_guest_or_an_api_but_itself_and_those_that_need_it(name: str, product: dict[Path, set[str]]):
    allowed = {name, *(f"guests.{other}" for other in GUESTS if name.removeprefix("guests.") in NEEDS[other])}
    own = {GATEWAY / each.replace(".", "/") for each in allowed}
    found = [
        path
        for path, modules in product.items()
        if own.isdisjoint(path.parents) and any(one.startswith(f"antiphon.services.gateway.{name}.") for one in modules)
    ]
    assert not found


def test_what_is_needed_needs_nothing_itself():
    assert not [name for name in GUESTS for other in NEEDS[name] if NEEDS[other]]


@pytest.mark.parametrize("name", slow_but(["guests.lockstep", "guests.responses", "apis.ollama"], FOLDERS))
def test_without_its_folder_requests_are_served(name: str, tmp_path: Path):
    for folder in ("shared", "tests", "infra", "pyproject.toml"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for folder in ("services", "antiphon"):
        (tmp_path / folder).mkdir()
    for part in (ROOT / "antiphon").iterdir():
        # Those that are links themselves lead to the copies.
        (tmp_path / "antiphon" / part.name).symlink_to(part.readlink() if part.is_symlink() else part)
    for part in (ROOT / "services").iterdir():
        if part.name != "gateway":
            (tmp_path / "services" / part.name).symlink_to(part)
    shutil.copytree(ROOT / "services/gateway", tmp_path / "services/gateway")
    shutil.rmtree(tmp_path / "services/gateway" / name.replace(".", "/"))
    tests = STILL if name == "guests.responses" else (*STILL, ALSO)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]
