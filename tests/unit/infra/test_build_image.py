"""The script that builds the image of the whole server, with a stand-in for Docker, and what its Dockerfile says."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "infra" / "docker" / "build_image.sh"
DOCKERFILE = ROOT / "infra" / "docker" / "server.Dockerfile"


def build(path: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(SCRIPT), *words],
        env={**os.environ, "PATH": path, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A search path whose `docker` prints its arguments, one a line."""
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    docker.chmod(0o755)
    return f"{tmp_path}:/usr/bin:/bin"


@pytest.mark.parametrize(
    "words",
    [
        ("--base-image=debian:12", "--image-name=mine:1"),
        ("--base-image", "debian:12", "--image-name", "mine:1"),
        ("--image-name", "mine:1", "--base-image=debian:12"),
    ],
)
def test_base_and_name_reach_docker_in_either_form(path: str, words: tuple[str, ...]) -> None:
    done = build(path, *words, TORCH_INDEX_URL="https://index")
    assert done.returncode == 0
    *argv, last = done.stdout.splitlines()
    assert argv[:7] == ["build", "--file", str(DOCKERFILE), "--target", "run", "--tag", "mine:1"]
    assert argv[7:] == [
        "--build-arg",
        "BASE_IMAGE=debian:12",
        "--build-arg",
        "TORCH_INDEX_URL=https://index",
        str(ROOT),
    ]
    assert last.startswith("built mine:1;")


def test_the_defaults_are_those_of_the_dockerfile(path: str) -> None:
    argv = build(path, TORCH_INDEX_URL="").stdout.splitlines()
    [base] = re.findall(r"^ARG BASE_IMAGE=(.+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert f"BASE_IMAGE={base}" in argv
    assert argv[argv.index("--tag") + 1] == "antiphon"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--image=x",), "unknown option --image=x"),
        (("x",), "unknown option x"),
        (("--image-name=",), "--image-name needs a value"),
        (("--base-image",), "--base-image needs a value"),
    ],
)
def test_a_wrong_call_builds_nothing(path: str, words: tuple[str, ...], told: str) -> None:
    done = build(path, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr


def test_a_machine_without_docker_is_told_so(tmp_path: Path) -> None:
    for name in ("sh", "dirname"):
        (tmp_path / name).symlink_to(f"/bin/{name}" if Path(f"/bin/{name}").exists() else f"/usr/bin/{name}")
    done = build(str(tmp_path))
    assert done.returncode == 1
    assert "install Docker" in done.stderr


def test_a_build_that_fails_is_no_success(path: str) -> None:
    (Path(path.partition(":")[0]) / "docker").write_text("#!/bin/sh\nexit 3\n")
    done = build(path)
    assert (done.returncode, done.stdout) == (3, "")


def test_the_image_starts_run_as_no_root_and_holds_everything() -> None:
    text = DOCKERFILE.read_text()
    assert set(re.findall(r"^COPY (\w+) \w+$", text, re.MULTILINE)) == {"shared", "services", "antiphon"}
    assert text.index("\nUSER 10001\n") > text.rindex("\nUSER root\n")
    run, serve = text.split("\nFROM run AS serve\n")
    assert run.endswith('EXPOSE 8501\nSTOPSIGNAL SIGTERM\nENTRYPOINT ["python", "-m", "antiphon"]\nCMD ["run"]\n')
    assert 'CMD ["serve", "--host=0.0.0.0", "--port=8000"]' in serve
    assert "EXPOSE 8000\n" in serve
    assert "HEALTHCHECK" in serve
    assert "pyproject.toml project >" in text
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists()
            assert any(source == each or source.startswith(f"{each}/") for each in allowed), source
