"""The image of the whole server: built by its script, started by `docker run`, asked over its port.

Needs Docker; run by `make container-test`, never by `make test`.
"""

import http.client
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASE, NAME = "python:3.11-slim-bookworm", f"antiphon-server-test-{os.getpid()}"
READY_S = 240.0
TORCH = ("--build-arg", f"TORCH_INDEX_URL={os.environ.get('TORCH_INDEX_URL', '')}")
pytestmark = [pytest.mark.container, pytest.mark.timeout(1800)]


def run(*argv: str, code: int = 0) -> str:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, f"{' '.join(argv)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return (done.stdout if code == 0 else done.stdout + done.stderr).strip()


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    run("sh", "infra/docker/build_image.sh", f"--base-image={BASE}", f"--image-name={NAME}")
    yield NAME
    run("docker", "image", "rm", "-f", NAME)


def ask(port: int, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        data = None if body is None else json.dumps(body)
        connection.request("POST" if data else "GET", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")
    except (OSError, http.client.HTTPException):
        return 0, None
    finally:
        connection.close()


@pytest.mark.spec("S-DIS-053")
def test_the_script_builds_an_image_whose_container_answers(image: str, tmp_path: Path) -> None:
    assert run("docker", "image", "inspect", "-f", "{{.Config.User}} {{.Config.Cmd}}", image) == "10001 [run]"
    tmp_path.chmod(0o755)
    for file in (ROOT / "antiphon" / "demo").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / file.name).chmod(0o644)
    published = ("-p", "127.0.0.1::8501", "-v", f"{tmp_path}:/data/model:ro", "-e", "MODEL_ID=Foo")
    container = run("docker", "run", "-d", *published, image)
    try:
        port = int(run("docker", "port", container, "8501").rpartition(":")[2])
        deadline = time.monotonic() + READY_S
        while ask(port, "/readyz")[0] != 200:
            assert time.monotonic() < deadline, run("docker", "logs", container)
            time.sleep(0.5)
        status, answer = ask(port, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]})
        assert (status, answer["model"]) == (200, "Foo")
        assert answer["choices"][0]["message"]["content"]
    finally:
        run("docker", "rm", "-f", container)


def test_one_command_builds_an_image_that_serves_the_demo_model_and_knows_its_health() -> None:
    name = f"{NAME}-serve"
    run("docker", "build", "-q", "-f", "infra/docker/server.Dockerfile", "-t", name, *TORCH, ".")
    container = run("docker", "run", "-d", "-p", "127.0.0.1::8000", name)
    try:
        port = int(run("docker", "port", container, "8000").rpartition(":")[2])
        deadline = time.monotonic() + READY_S
        health = ("docker", "inspect", "-f", "{{.State.Health.Status}}", container)
        while run(*health) != "healthy":
            assert time.monotonic() < deadline, run("docker", "logs", container)
            time.sleep(1.0)
        question = {"messages": [{"role": "user", "content": "What is 12 + 7?"}], "temperature": 0}
        status, answer = ask(port, "/v1/chat/completions", question)
        assert (status, "19" in answer["choices"][0]["message"]["content"]) == (200, True)
        assert ask(port, "/v1/chat/completions", {**question, "temperature": 9})[0] == 400
        assert "compiling" not in run("docker", "logs", container)
        told = run("docker", "run", "--rm", name, "serve", "--model=/nowhere", code=78)
        assert "--model" in told
    finally:
        run("docker", "rm", "-f", container)
        run("docker", "image", "rm", "-f", name)


def test_a_container_with_a_setting_that_cannot_be_ends_with_78(image: str) -> None:
    told = run("docker", "run", "--rm", "-e", "CONV_TEMPLATE=nope", image, code=78)
    assert "environment variable CONV_TEMPLATE: nope is not one of" in told
