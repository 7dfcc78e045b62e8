"""A release is a commit and a tag; its workflow runs commands that exist."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from infra.dist.release import LINES_MAX, main

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- Songs.\n\n## [0.1.0] - 2026-01-01\n\n- First.\n"


def git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "x")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "x@example.org")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/version.py").write_text('__version__ = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    return tmp_path


def test_a_release_is_a_commit_and_a_tag_with_its_changes(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["0.2.0"]) == 0
    assert "git push origin HEAD v0.2.0" in capsys.readouterr().out
    assert (repository / "shared/version.py").read_text() == '__version__ = "0.2.0"\n'
    assert git("status", "--porcelain") == ""
    assert "- Songs." in git("tag", "--list", "-n9", "v0.2.0")
    assert main(["--notes", "0.2.0"]) == 0
    assert capsys.readouterr().out == "### Added\n\n- Songs.\n"
    # Nothing new since then.
    assert main(["0.3.0"]) == 1


@pytest.mark.parametrize(
    ("version", "change", "told"),
    [
        ("0.2", "", "three numbers"),
        ("0.2.0", "- More.\n", "commit them first"),
        ("0.1.0", "", "already"),
        ("0.2.0", "- More.\n" * LINES_MAX, "more than 60"),
    ],
)
def test_what_cannot_be_released_changes_nothing(
    repository: Path, capsys: pytest.CaptureFixture[str], version: str, change: str, told: str
) -> None:
    git("tag", "v0.1.0")
    changelog = repository / "CHANGELOG.md"
    changelog.write_text(CHANGELOG.replace("- Songs.\n", f"- Songs.\n{change}"))
    if told.startswith("more"):
        git("commit", "-qam", "second")
    before = (git("rev-parse", "HEAD"), changelog.read_text())
    assert main([version]) == 1
    assert told in capsys.readouterr().err
    assert (git("rev-parse", "HEAD"), changelog.read_text()) == before


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_commands_and_files_that_exist(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all(("run" in step) != ("uses" in step) for step in steps)
    assert all(re.fullmatch(r"[\w./-]+@[\w./-]+", step["uses"]) for step in steps if "uses" in step)
    commands = "\n".join(step["run"] for step in steps if "run" in step)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", commands)) <= targets
    for module in re.findall(r"-m (infra[\w.]+)", commands):
        at = ROOT / module.replace(".", "/")
        assert at.is_dir() or at.with_suffix(".py").exists()
    files = [step["with"]["file"] for step in steps if "file" in step.get("with", {})]
    assert all((ROOT / file).exists() for file in files)
    needed = {name for job in workflow["jobs"].values() for name in job.get("needs", ())}
    assert needed <= {*workflow["jobs"]}
