"""The layer that predicts further tokens in a GGUF file: it predicts what that of the converted checkpoint does."""

from pathlib import Path

import pytest

from antiphon.services.engine.core.plan import CoreLimits
from antiphon.shared.config import EngineSettings
from antiphon.shared.models.model_files import model_directory
from tests.draft_models import make_draft_model
from tests.gguf_files import Kind, write_gguf
from tests.model.harness import BACKENDS, make_prompt, make_worker
from tests.model.test_draft_layer import MOST, Watched, always
from tests.models import make_model

pytestmark = pytest.mark.model
LIMITS = CoreLimits(max_num_seqs=4, max_num_batched_tokens=24, num_speculative_tokens=MOST, use_lookahead=False)
__all__ = ["always"]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.shared.models.gguf_model.directory._CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "nemotron_h"])
def test_the_layer_predicts_what_that_of_the_checkpoint_does(
    family: str, backend: str, always: None, tmp_path: Path
) -> None:
    plain = write_gguf(make_draft_model(tmp_path / "source", family), tmp_path / "m.gguf", Kind.F16)
    directory = model_directory(EngineSettings(model=str(tmp_path / "m.gguf")))
    worker = make_worker(backend, directory, max_num_seqs=LIMITS.max_num_seqs, use_mtp=True, dtype="float32")
    watched = Watched(plain, LIMITS, worker)
    watched.engine.generate([make_prompt(length) for length in (50, 7, 33, 40)])
    assert len(watched.num_drafts) > 50


def test_a_file_without_the_layer_is_served_without_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_gguf(make_model(tmp_path / "source", "qwen3_5_text"), tmp_path / "m.gguf")
    directory = model_directory(EngineSettings(model=str(tmp_path / "m.gguf")))
    assert not make_worker("torch", directory, use_mtp=True).facts().has_draft_layer
    assert "the checkpoint lacks the layer that predicts further tokens" in caplog.text
