"""How the tests are divided among processes (pytest-xdist; `make test`): whole files, those that take longest first.

A file's tests stay together, since they share what its fixtures start, and so do those of a folder that is a package
(`__init__.py`): they share one system. A plugin that tests/conftest.py loads; it does nothing where all tests run in
one process.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROCESSES_MAX = 4
BYTES_OF_ONE = 4 * 2**30
"""Memory for each process, which loads PyTorch and keeps some models, and for the systems that it starts."""
LONGEST = (
    "tests/system/devices/test_disaggregation.py",
    "tests/native/test_sanitizers.py",
    "tests/quantized/test_sanitizers.py",
    "tests/system/reliability/test_second_opinion.py",
    "tests/sim/test_swarm.py",
    "tests/system/api",
    "tests/system/site",
    "tests/system/devices/test_parallel.py",
    "tests/model/test_parallel.py",
    "tests/model/test_parity.py",
    "tests/system/models/test_conversation_templates.py",
    "tests/system/devices/test_role_script.py",
    "tests/system/test_encoders.py",
    "tests/model/test_mask_turns.py",
    "tests/system/console",
    "tests/system/terminal",
    "tests/system/devices/test_machines.py",
    "tests/system/models/test_adapters.py",
    "tests/integration/test_stalled_engine.py",
    "tests/quantized/test_tool.py",
    "tests/sim/test_flow.py",
    "tests/model/test_triton_worker.py",
    "tests/model/test_triton_adapters.py",
    "tests/model/test_layer_heads.py",
    "tests/unit/engine/worker/test_memory_limit.py",
    "tests/unit/vision/test_memory_of_images.py",
)
"""What takes longest, the longest first; everything else follows in the order in which pytest finds it, and ends with
short files (tests/unit). A file that is missing here may keep one process busy when the others have ended."""


def unit_of(nodeid: str) -> str:
    """The file, or the package, whose tests run in one process with this one."""
    file = nodeid.partition("::")[0]
    folder = file.rpartition("/")[0]
    return folder if _is_package(folder) else file


@cache
def _is_package(folder: str) -> bool:
    return (ROOT / folder / "__init__.py").is_file()


def rank(nodeid: str) -> int:
    """The place in the order."""
    unit = unit_of(nodeid)
    return LONGEST.index(unit) if unit in LONGEST else len(LONGEST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means. One more than processors, because many tests wait."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(PROCESSES_MAX, len(os.sched_getaffinity(0)) + 1, memory // BYTES_OF_ONE))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives each process whole units, in the order in which they were collected."""
    # Imported here: tests run in one process without the package.
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        """One unit at a time for each process."""

        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False
    return Units(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts what takes longest first, where there are several processes."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank(item.nodeid))
