"""The other serving systems of the comparison: command, environment and version, one class for each.

Each system gets the settings that its own documentation recommends for a machine without a GPU, and all cores of this
machine; nothing else is tuned. Called by `bench.peer_systems.peers`.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from bench.harness.serving import HOST, Server, free_port

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
VLLM_KV_GIB = 4
MAX_MODEL_LEN = 2048
SLOTS = 32
"""Sequences that llama-server runs at once and that share its context: as many as the largest load has clients."""
SLOT_TOKENS = 1280
OPENVINO_KV_GIB = 4
OPENVINO_SERVER = Path(__file__).with_name("openvino_server.py")
TCMALLOC = "libtcmalloc_minimal.so.4"


class Vllm(Server):
    """The CPU build of `vllm serve`. `executable` is the command in vLLM's Python environment (`…/bin/vllm`)."""

    def __init__(self, executable: Path, model: Path, dtype: str) -> None:
        port = free_port()
        command = [str(executable), "serve", str(model), "--host", HOST, "--port", str(port)]
        command += ["--dtype", dtype, "--max-model-len", str(MAX_MODEL_LEN)]
        super().__init__("vllm", command, port, "/health", vllm_environment(executable))


class LlamaServer(Server):
    """llama.cpp's own server, with as many slots as the largest load has clients."""

    def __init__(self, executable: Path, gguf: Path, name: str = "llama.cpp") -> None:
        port, cores = free_port(), str(len(os.sched_getaffinity(0)))
        command = [str(executable), "-m", str(gguf), "--host", HOST, "--port", str(port), "-t", cores, "-tb", cores]
        command += ["-np", str(SLOTS), "-c", str(SLOTS * SLOT_TOKENS), "--no-webui"]
        super().__init__(name, command, port, "/health")


class OpenVino(Server):
    """OpenVINO GenAI, served by `openvino_server`. `python` is that of its environment."""

    def __init__(self, python: Path, model: Path, name: str = "OpenVINO") -> None:
        port = free_port()
        command = [str(python), str(OPENVINO_SERVER), str(model), "--port", str(port)]
        super().__init__(name, [*command, "--cache-gib", str(OPENVINO_KV_GIB)], port, "/health", openvino_environment())


def openvino_model(python: Path, model: Path, weights: str) -> Path:
    """Returns the model in OpenVINO's format with weights of a kind; makes it beside `model` if it is missing.

    `weights`: as `optimum-cli export openvino` calls it: fp16, int8, int4. Raises SystemExit if the command fails.
    """
    target = model.with_name(f"{model.name}-openvino-{weights}")
    if target.exists():
        return target
    tool = str(python.with_name("optimum-cli"))
    command = [tool, "export", "openvino", "--model", str(model), "--task", "text-generation-with-past"]
    command += ["--weight-format", weights, str(target)]
    environment = {**os.environ, **openvino_environment()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(target, ignore_errors=True)
        raise SystemExit(f"{tool} ended with code {done.returncode}: {done.stderr[-500:]}")
    return target


def openvino_environment() -> dict[str, str]:
    """Returns OpenVINO's environment variables: no downloads, and none of this project's modules."""
    return {**OFFLINE, "PYTHONPATH": ""}


def vllm_environment(executable: Path) -> dict[str, str]:
    """Returns vLLM's environment variables: threads on all cores, and the libraries that vLLM asks to preload.

    By default vLLM reserves one core for its server.
    """
    cores = sorted(os.sched_getaffinity(0))
    preload = [TCMALLOC] if _library_exists(TCMALLOC) else []
    openmp = executable.parent.parent / "lib" / "libiomp5.so"
    preload += [str(openmp)] if openmp.exists() else []
    return {
        **OFFLINE,
        "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        **({"LD_PRELOAD": ":".join(preload)} if preload else {}),
    }


def vllm_version(executable: Path) -> str:
    """Returns the versions of vLLM and torch in the environment of the command."""
    code = 'from importlib.metadata import version as v; print(f\'{v("vllm")}, torch {v("torch")}\')'
    return _output([str(executable.parent / "python"), "-c", code]).strip()


def openvino_version(python: Path) -> str:
    """Returns the version of OpenVINO GenAI in the environment of its Python."""
    return _output([str(python), "-c", "import openvino_genai; print(openvino_genai.__version__)"]).strip()


def llama_version(executable: Path) -> str:
    """Returns the version that the program prints, or "unknown"."""
    found = re.search(r"version: (.*)", _output([str(executable), "--version"]))
    return found[1] if found else "unknown"


def _library_exists(name: str) -> bool:
    return name in _output(["/sbin/ldconfig", "-p"])


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr
