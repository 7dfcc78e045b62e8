import logging
from pathlib import Path

import pytest
import torch

from antiphon.services.engine.quantization.choice import weight_form
from antiphon.shared.config import EngineSettings


@pytest.mark.parametrize(("asked", "native", "told"), [("ifq", False, True), ("ifq", True, False), ("", False, False)])
def test_a_backend_without_quantized_products_says_that_it_saves_no_time(
    asked: str, native: bool, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        form = weight_form(EngineSettings(quantization=asked), tmp_path, {}, torch.device("cpu"), native=native)
    assert form.is_plain == (asked == "")
    assert ("it saves memory, not time" in caplog.text) == told
