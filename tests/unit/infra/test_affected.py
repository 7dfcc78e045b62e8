"""Which tests a change can affect, read from the sources of a small project and of this one."""

from pathlib import Path

import pytest

from infra.checks.affected import affected

SOURCES = {
    "shared/__init__.py": "",
    "shared/words.py": "",
    "services/one/__init__.py": "",
    "services/one/__main__.py": "def main():\n    from antiphon.shared import words\n",
    "services/one/code/build.py": 'NAME = "part.cpp"\n',
    "services/found/finding.py": "import pkgutil\n",
    "services/found/guests/a.py": "",
    "antiphon/launcher.py": 'name = "one"\nargv = ["python", "-m", f"antiphon.services.{name}"]\n',
    "antiphon/__main__.py": "from antiphon.launcher import argv\n",
    "tests/conftest.py": "pytest_plugins = ('tests.plugin',)\n",
    "tests/plugin.py": "",
    "tests/unit/test_words.py": "import antiphon.shared.words\n",
    "tests/unit/test_finding.py": "from antiphon.services.found import finding\n",
    "tests/unit/test_alone.py": 'name = "antiphon"\nfile = "table.tsv"\n',
    "tests/system/conftest.py": "",
    "tests/system/test_serve.py": 'argv = ("antiphon", "serve")\n',
    "tests/attack/test_attack.py": "import antiphon.shared.words\n",
}
ALONE, FINDING, SERVE, WORDS = (
    "tests/unit/test_alone.py",
    "tests/unit/test_finding.py",
    "tests/system/test_serve.py",
    "tests/unit/test_words.py",
)


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("tests/unit/test_alone.py", [ALONE]),
        ("shared/words.py", [SERVE, WORDS]),
        ("shared/__init__.py", [SERVE, WORDS]),
        ("services/one/__main__.py", [SERVE]),
        ("services/found/guests/a.py", [FINDING]),
        ("tests/system/conftest.py", [SERVE]),
        ("tests/plugin.py", [SERVE, ALONE, FINDING, WORDS]),
        ("pyproject.toml", [SERVE, ALONE, FINDING, WORDS]),
        ("docs/table.tsv", [ALONE]),
        ("services/one/code/source/part.cpp", []),
        ("docs/unknown.md", []),
        ("shared/deleted.py", []),
    ],
)
def test_tests_are_affected_by_what_they_import_and_start(changed: str, tests: list[str]) -> None:
    assert affected(SOURCES, {changed}) == tests


def test_a_change_of_one_room_leaves_most_tests_of_this_project_alone() -> None:
    folders = ("antiphon", "services", "shared", "tests")
    sources = {path.as_posix(): path.read_text() for folder in folders for path in Path(folder).rglob("*.py")}
    found = affected(sources, {"services/gateway/apis/ollama/api.py"})
    assert {"tests/integration/test_ollama_api.py", "tests/system/test_other_apis.py"} <= {*found}
    assert not [path for path in found if path.startswith(("tests/model", "tests/unit/engine/core"))]
