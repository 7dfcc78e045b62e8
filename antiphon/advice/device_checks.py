"""The device section of `antiphon doctor`: the GPUs of this machine, the processes that use them, what Docker needs.

GPUs are listed with `nvidia-smi`, which is part of the driver, so that GPUs whose driver torch cannot use are found
too.
"""

import csv
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["ok", "warn", "fail"]
_GPU_QUERY = "--query-gpu=index,uuid,name,memory.total,driver_version,compute_cap"
_PROCESS_QUERY = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
_FORMAT = "--format=csv,noheader,nounits"
_SMI_S = 30.0
_DRIVERS = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580,)}
"""The oldest Linux driver for each major version of CUDA, from NVIDIA's table of minor version compatibility."""
_CAPABILITY_MIN = (8, 0)
"""Lowest compute capability that the Triton kernels support; older GPUs compute with PyTorch's operations."""
_IP_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `advice` says what the user can do; it is empty if there is nothing to do."""

    state: State
    subject: str
    finding: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:  # positional: a row of what `_GPU_QUERY` asks for
    """A GPU as `nvidia-smi` lists it. `memory` in MiB; `capability` is the compute capability, such as `9.0`."""

    index: str
    uuid: str
    name: str
    memory: str
    driver: str
    capability: str


def device_checks(cuda: str, torch_gpus: int) -> list[Check]:
    """Returns the findings about GPUs, NPUs and the network of containers.

    `cuda` is the version of CUDA that torch was built for, '' for none; `torch_gpus` the number of GPUs that torch can
    use.
    """
    return [*gpus(cuda, torch_gpus), *npus(), *ip_forward()]


def gpus(cuda: str, torch_gpus: int) -> list[Check]:
    """Returns a finding about the number of GPUs and one for each GPU.

    Without a GPU, engines run on the CPU (no warning).
    """
    if not shutil.which("nvidia-smi"):
        return [Check("ok", "GPU", "no NVIDIA GPU: runs on the CPU")]
    code, output = _query(_GPU_QUERY)
    if code:
        advice = "install NVIDIA's driver again; in a container, start it with --gpus"
        return [Check("warn", "GPU", f"nvidia-smi fails: {(output.strip().splitlines() or ['no output'])[-1]}", advice)]
    found = [Gpu(*row) for row in _rows(output, 6)]
    if not found:
        return [Check("ok", "GPU", "nvidia-smi lists none: runs on the CPU")]
    holders = _holders()
    driver = driver_check(found[0].driver, cuda)
    return [_count(len(found), torch_gpus, cuda), driver, *(_gpu(each, holders.get(each.uuid, [])) for each in found)]


def listed_gpus() -> list[Gpu]:
    """Returns the GPUs for which `nvidia-smi` reports the memory; empty without a driver or without GPUs."""
    if not shutil.which("nvidia-smi"):
        return []
    code, output = _query(_GPU_QUERY)
    return [gpu for gpu in (Gpu(*row) for row in _rows(output, 6)) if gpu.memory.isdecimal()] if code == 0 else []


def driver_check(driver: str, cuda: str) -> Check:
    """Checks that the driver is new enough for the CUDA of torch. Both are versions; `cuda` may be ''."""
    if not cuda:
        return Check("ok", "GPU driver", driver)
    needed = _DRIVERS.get(int(cuda.partition(".")[0]))
    if needed is None or _version(driver) >= needed:
        return Check("ok", "GPU driver", f"{driver}, enough for the CUDA {cuda} of torch")
    text = ".".join(map(str, needed))
    advice = f"install driver {text} or newer, or a torch for an older CUDA"
    return Check("warn", "GPU driver", f"{driver} is too old for the CUDA {cuda} of torch", advice)


def npus(directory: Path = Path("/dev")) -> list[Check]:
    """Returns a warning if the machine has Ascend NPUs, which Antiphon does not support."""
    if not shutil.which("npu-smi") and not any(directory.glob("davinci[0-9]*")):
        return []
    advice = "engines run on the CPU or on NVIDIA GPUs of this machine"
    return [Check("warn", "NPU", "Ascend NPU found: Antiphon does not compute on it", advice)]


def ip_forward(path: Path = _IP_FORWARD) -> list[Check]:
    """Checks, where Docker is installed, that the kernel forwards packets, which networks of containers need."""
    if not shutil.which("docker") or not path.is_file():
        return []
    value = path.read_text().strip()
    if value == "1":
        return [Check("ok", "ip_forward", "net.ipv4.ip_forward is 1")]
    advice = "only containers need it: sysctl -w net.ipv4.ip_forward=1, and the same line in /etc/sysctl.conf"
    return [Check("warn", "ip_forward", f"net.ipv4.ip_forward is {value}", advice)]


def _count(found: int, torch_gpus: int, cuda: str) -> Check:
    text = f"{found} NVIDIA GPU{'s' if found > 1 else ''}"
    if torch_gpus >= found:
        return Check("ok", "GPU", text)
    if not cuda:
        return Check(
            "warn", "GPU", f"{text}, and a torch without CUDA: runs on the CPU", "pip install a torch for CUDA"
        )
    advice = "see the driver below, and CUDA_VISIBLE_DEVICES"
    return Check("warn", "GPU", f"{text}, of which torch can use {torch_gpus}", advice)


def _gpu(gpu: Gpu, holders: Sequence[str]) -> Check:
    memory = f"{int(gpu.memory) / 1024:.0f} GiB" if gpu.memory.isdecimal() else "memory unknown"
    text = f"{gpu.name}, {memory}, compute capability {gpu.capability}"
    if holders:
        advice = "stop it, or its container, or give engines other GPUs with CUDA_VISIBLE_DEVICES"
        return Check("warn", f"GPU {gpu.index}", f"{text}; in use by {', '.join(holders)}", advice)
    if _version(gpu.capability) < _CAPABILITY_MIN:
        return Check("ok", f"GPU {gpu.index}", f"{text}: PyTorch's operations, no bfloat16 kernels")
    return Check("ok", f"GPU {gpu.index}", text)


def _holders() -> dict[str, list[str]]:
    """Returns the processes that compute on each GPU, by its uuid; empty if the driver does not report them."""
    code, output = _query(_PROCESS_QUERY)
    found: dict[str, list[str]] = {}
    for uuid, pid, name, memory in _rows(output, 4) if code == 0 else ():
        found.setdefault(uuid, []).append(f"process {pid} ({Path(name).name}, {memory} MiB)")
    return found


def _query(what: str) -> tuple[int, str]:
    try:
        done = subprocess.run(
            ["nvidia-smi", what, _FORMAT], capture_output=True, text=True, timeout=_SMI_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout + done.stderr


def _rows(output: str, columns: int) -> list[list[str]]:
    rows = ([word.strip() for word in row] for row in csv.reader(output.splitlines()))
    return [row for row in rows if len(row) == columns]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d+", text))
