"""The adapters that the benchmark of adapters writes: the engine reads them, and they change what was asked for."""

from pathlib import Path

import pytest

from antiphon.services.engine.adapters.peft_files import AdapterReader
from antiphon.services.engine.models.registry import find_family
from antiphon.services.engine.worker.loading.model_files import read_config
from bench.adapters import TARGETS, parse, write_adapter
from tests.models import make_model


@pytest.mark.parametrize("name", TARGETS)
def test_the_engine_reads_what_is_written(name: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    write_adapter(tmp_path / "adapter", model, TARGETS[name], 4, seed=1)
    config = read_config(model)
    family = find_family(config)
    adapter = AdapterReader(family.layout(family.describe(config)), 4).read(tmp_path / "adapter", "tales")
    assert adapter.rank == 4
    assert len(adapter.deltas) == 2 * {"attention": 1, "every": 4}[name], "matrices of two layers, joined ones as one"


def test_each_stream_needs_an_adapter_of_its_own() -> None:
    with pytest.raises(SystemExit):
        parse(["--model", "m", "--adapters", "4", "--streams", "5"])
