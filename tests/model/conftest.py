"""Models and what transformers makes of them, each once for the whole folder."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.model.harness import NUM_TOKENS, VARIANTS, Models, Reference
from tests.models import greedy_reference, make_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Makes each variant once."""
    made: dict[str, Path] = {}

    def make(variant: str) -> Path:
        if variant not in made:
            family, overrides = VARIANTS[variant]
            made[variant] = make_model(tmp_path_factory.mktemp("model"), family, **overrides)
        return made[variant]

    return make


@pytest.fixture(scope="session")
def reference(models: Models) -> Reference:
    """What transformers generates, once for each variant and prompt."""
    known: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def generate(variant: str, prompts: list[list[int]], answers: Sequence[list[int]] = ()) -> list[list[int]]:
        found = list[list[int]]()
        for prompt, answer in zip(prompts, answers or [[]] * len(prompts), strict=True):
            key = (variant, tuple(prompt))
            if key not in known:
                known[key] = greedy_reference(models(variant), prompt, NUM_TOKENS, answer)
            found.append(known[key])
        return found

    return generate


@pytest.fixture
def kernels_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads may start kernels: the interpreter runs one at a time."""
    from antiphon.services.engine.backends.triton.kernels import runtime

    lock, start = threading.Lock(), runtime._start

    def start_alone(*arguments: Any) -> None:
        with lock:
            start(*arguments)

    monkeypatch.setattr(runtime, "_start", start_alone)
