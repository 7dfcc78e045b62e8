"""The memory that a plan predicts for the largest image, against the peak of a process that encodes it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from antiphon.services.vision.estimate import vision_needs
from antiphon.shared import limits
from antiphon.shared.flags import SettingsError
from tests.vision_models import image, make_vision_model

ROOT = Path(__file__).resolve().parents[3]
WIDTH, INNER, TILE, SIDE = 256, 4096, 14 * 16, 14 * 48
"""The rows of MLPs are 32 MiB or more, for which memory is taken that no earlier array has used."""
_ENCODER = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": 4}
LARGE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "idefics3": (
        {**_ENCODER, "image_size": TILE},
        {"size": {"longest_edge": SIDE}, "max_image_size": {"longest_edge": TILE}},
    ),
    "mistral3": ({**_ENCODER, "head_dim": 64, "image_size": SIDE}, {"size": {"longest_edge": SIDE}}),
    "glm4v": (
        {"hidden_size": WIDTH, "out_hidden_size": INNER // 2, "intermediate_size": WIDTH, "num_heads": 4},
        {"size": {"shortest_edge": 6272, "longest_edge": 2 * SIDE * SIDE}},
    ),
}
"""Fields of the encoder's config and of the processor with which an image has more than 2,000 patches."""


def _large(directory: Path, family: str) -> Path:
    make_vision_model(directory, family)
    vision, processor = LARGE[family]
    config = json.loads((directory / "config.json").read_text())
    config["vision_config"] |= vision
    (directory / "config.json").write_text(json.dumps(config))
    path = directory / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **processor}))
    return directory


def test_the_step_of_the_largest_image_is_what_a_process_grows_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = [_large(tmp_path / family, family) for family in LARGE]
    (file := tmp_path / "image.jpeg").write_bytes(image(SIDE, SIDE, kind="JPEG"))
    # A process of its own: what earlier tests have left in the heap would count.
    asked = [sys.executable, "-m", "tests.unit.vision.image_peak", str(file), *map(str, directories)]
    measured = json.loads(subprocess.run(asked, cwd=ROOT, check=True, capture_output=True).stdout)
    # The limit of pixels is far above this image, and files are held by the actor.
    monkeypatch.setattr(limits, "IMAGE_PIXELS_MAX", SIDE * SIDE)
    monkeypatch.setattr(limits, "IMAGE_BYTES_MAX", 0)
    predicted = [vision_needs(directory, {}, "cpu").step for directory in directories]
    # What is alive at the peak, and at most a quarter more for the pieces of freed arrays that a heap keeps.
    pairs = list(zip(measured, predicted, strict=True))
    assert all(each <= step <= 1.25 * each for each, step in pairs), pairs
    for directory, step in zip(directories, predicted, strict=True):
        assert 0 < vision_needs(directory, {}, "cuda").step < step


def test_arguments_with_which_no_image_can_be_processed_are_refused(tmp_path: Path) -> None:
    directory = make_vision_model(tmp_path, "qwen2_vl")
    with pytest.raises(SettingsError, match="no image can be processed with them"):
        vision_needs(directory, {"size": {"height": 7, "width": 7}}, "cpu")
