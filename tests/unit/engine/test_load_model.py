"""Loading a model in a process that has loaded one before."""

import gc
from typing import Any, cast

import pytest

from antiphon.services.engine.backends import load
from antiphon.services.engine.engine import load_model
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.shared.config import EngineSettings


def test_a_later_load_leaves_the_garbage_of_the_process_to_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = cast(ModelWorker, object())

    def loaded(settings: EngineSettings) -> Any:
        assert gc.isenabled()
        return worker

    monkeypatch.setattr(load, "load_worker", loaded)
    frozen = gc.get_freeze_count()
    assert load_model(EngineSettings()) is worker
    assert gc.get_freeze_count() == frozen
