"""What the processes of a server import before they are ready: all of it delays the first answer.

A server starts five processes at once on what may be two cores, so each second of CPU time of any of them counts.
"""

import subprocess
import sys

import pytest

ANYWHERE = frozenset({"torch", "transformers", "gguf", "llguidance", "jinja2", "opentelemetry", "pydantic", "fastapi"})
"""Packages that no process needs before it has connected to the bus."""
SERVICES = {
    # FastAPI imports pydantic and opentelemetry.
    "gateway": (ANYWHERE - {"fastapi", "pydantic", "opentelemetry"}) | {"numpy", "tokenizers", "PIL"},
    "tokenizer": ANYWHERE | {"numpy", "ctypes", "uvicorn"},
    "detokenizer": ANYWHERE | {"numpy", "ctypes", "uvicorn"},
    "engine": ANYWHERE | {"uvicorn", "tokenizers", "safetensors"},
}
LAUNCHER = ANYWHERE | {"numpy", "nats", "msgspec", "http.client", "email", "tomllib", "ctypes", "importlib.metadata"}
"""The children start only after the launcher's imports, while all other cores are idle."""
MODEL = frozenset({"transformers", "gguf", "yaml", "jinja2", "fastapi"})
"""Packages that no model of the CPU backend needs, unless its files have a special form."""


def imported(code: str, modules: frozenset[str]) -> set[str]:
    """Those of the modules that a new process has imported after `code`."""
    program = f"import sys\n{code}\nprint(*({set(modules)!r} & set(sys.modules)))"
    return {*subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()}


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_imports_nothing_that_it_does_not_need_to_become_ready(service: str) -> None:
    assert not imported(f"import antiphon.services.{service}.__main__", SERVICES[service])


def test_the_launcher_imports_no_library_of_the_services_before_they_start() -> None:
    assert not imported("import antiphon.cli, antiphon.launch.launcher", LAUNCHER)


def test_a_plain_model_is_loaded_without_readers_of_other_formats() -> None:
    assert not imported(
        "import antiphon.services.engine.backends.load, antiphon.services.engine.backends.cpu.worker", MODEL
    )


def test_imports_of_a_service_are_not_interrupted_by_garbage_collections() -> None:
    code = (
        "import gc; found = []; gc.callbacks.append(lambda phase, info: found.append(phase))\n"
        "from antiphon.shared.actors.imports import without_collections\n"
        "before = len(found)\n"
        "with without_collections():\n    import antiphon.services.tokenizer.service\n"
        "assert len(found) == before and gc.isenabled() and gc.get_freeze_count()"
    )
    assert not imported(code, frozenset())
