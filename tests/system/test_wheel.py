"""The first five minutes with nothing but the wheel, in a directory with folders that are named as ours.

The environment has no Triton and no compiler. The dependencies are those of the tests; the package comes from the
wheel alone.
"""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.dist.__main__ import run, with_libraries
from tests.gguf_files import Kind, write_gguf
from tests.models import make_model
from tests.system.served import ROOT, Started, fetch_url, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.timeout(240)]
FOREIGN = ("services", "shared", "antiphon")
"""Folders of the user's own project, which must not run."""
APP = """
import sys
from antiphon import LLM, SamplingParams
for model in sys.argv[1:]:
    with LLM(model, kv_cache_memory_gb=0.05) as llm:
        [answer] = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=4))
        print(len(answer.outputs[0].token_ids))
assert not {"services", "shared"} & set(sys.modules)
"""


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An environment, and a user's directory."""

    bin: Path
    project: Path
    environ: dict[str, str]

    def call(self, *words: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        argv = [str(self.bin / words[0]), *words[1:]]
        return subprocess.run(
            argv, cwd=self.project, env=self.environ, input=stdin, capture_output=True, text=True, timeout=120
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    at = tmp_path_factory.mktemp("wheel")
    run("hatchling", "build", "-d", str(at / "plain"), "-t", "wheel", cwd=ROOT)
    [plain] = (at / "plain").iterdir()
    libraries = sorted((ROOT / "services/engine/backends/cpu/compiled").glob("*.so"))
    platform = sysconfig.get_platform().replace("-", "_")
    wheel = with_libraries(plain, libraries, platform, at)
    run("venv", "--without-pip", str(at / "env"))
    run("pip", "--python", str(at / "env/bin/python"), "install", "-q", "--no-deps", "--no-index", str(wheel))
    [site] = (at / "env").glob("lib/python*/site-packages")
    # A directory that a .pth file names: files of this kind in it, as that of an editable install, have no effect.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "triton.py").write_text("raise ImportError('not installed')\n")
    (at / "env/bin/nats-server").symlink_to(Path(sys.executable).parent / "nats-server")
    project = at / "project"
    for name in FOREIGN:
        (project / name).mkdir(parents=True)
        (project / name / "__init__.py").write_text("raise RuntimeError('code of a stranger')\n")
    (at / "home").mkdir(mode=0o700)
    return Installed(
        bin=at / "env/bin", project=project, environ={"PATH": str(at / "env/bin"), "HOME": str(at / "home")}
    )


@pytest.fixture(scope="module")
def served(installed: Installed) -> Iterator[tuple[Started, str]]:
    argv = [str(installed.bin / "antiphon"), "serve", "--port=0", "--kv-cache-memory-gb=0.05"]
    started = Started(argv, installed.environ, installed.project)
    try:
        started.wait_for("Antiphon is ready")
        yield started, next(line.split()[-1] for line in started.lines if " URL " in f" {line} ").removesuffix("/v1")
    finally:
        started.stop()


def test_the_demo_model_answers_and_the_first_start_compiles_nothing(served: tuple[Started, str]) -> None:
    started, url = served
    question = {"messages": [{"role": "user", "content": "What is 12 + 7?"}], "temperature": 0}
    answer = fetch_url("POST", f"{url}/v1/chat/completions", question)
    assert "19" in answer.json["choices"][0]["message"]["content"]
    assert not [line for line in started.lines if "compiling" in line or "stranger" in line]


def test_one_talks_to_it_in_the_terminal(installed: Installed, served: tuple[Started, str]) -> None:
    done = installed.call("antiphon", "chat", "--server", served[1], stdin="What is 12 + 7?\n")
    assert (done.returncode, "19" in done.stdout) == (0, True), done.stdout + done.stderr


def test_a_service_that_dies_is_started_again_from_the_wheel(served: tuple[Started, str]) -> None:
    started, url = served
    children = Path(f"/proc/{started.process.pid}/task/{started.process.pid}/children").read_text().split()
    [engine] = [pid for pid in children if b"antiphon.services.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(int(engine), 9)
    question = {"prompt": "Once upon a time", "max_tokens": 4}
    wait_until(lambda: fetch_url("POST", f"{url}/v1/completions", question).status == 200, 60, lambda: started.output)


def test_a_program_uses_models_of_its_own(installed: Installed, tmp_path: Path) -> None:
    make_model(tmp_path / "tiny", "qwen2")
    write_gguf(tmp_path / "tiny", tmp_path / "own.gguf", Kind.Q8_0)
    # A project has its own modules beside its program.
    (installed.project / "app.py").write_text(APP)
    for name in FOREIGN[:2]:
        (installed.project / name / "mine.py").touch()
    (installed.project / FOREIGN[2]).rename(installed.project / "kept")
    try:
        done = installed.call("python", "app.py", str(tmp_path / "tiny"), str(tmp_path / "own.gguf"))
    finally:
        (installed.project / "kept").rename(installed.project / FOREIGN[2])
    assert (done.returncode, done.stdout.split()) == (0, ["4", "4"]), done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--model=nowhere",), "--model"),
        (("--max-num-seq=3",), "--max-num-seqs"),
        (("--dtype=float64",), "--dtype"),
    ],
)
def test_a_wrong_start_ends_with_what_to_do(installed: Installed, words: tuple[str, ...], told: str) -> None:
    done = installed.call("antiphon", "serve", *words)
    assert done.returncode in (2, 78)
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_the_memory_of_a_model_is_planned(installed: Installed) -> None:
    done = installed.call("antiphon", "plan")
    assert (done.returncode, "antiphon-demo" in done.stdout) == (0, True), done.stderr


def test_nothing_of_it_is_called_services_or_shared(installed: Installed, tmp_path: Path) -> None:
    code = "from importlib.util import find_spec as f; import antiphon; print(f('services'), f('shared'), antiphon.LLM)"
    done = subprocess.run(
        [installed.bin / "python", "-c", code], cwd=tmp_path, env=installed.environ, capture_output=True, text=True
    )
    assert done.stdout.startswith("None None <class"), done.stderr
