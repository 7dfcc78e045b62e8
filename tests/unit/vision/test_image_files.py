"""Files of images: how many pixels are decoded, and what is refused by its header."""

import io

import pytest
from PIL import Image

from antiphon.services.vision import images
from antiphon.services.vision.images import open_image
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError

SIDE = 40


def file_of(kind: str, width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.radial_gradient("L").resize((width, height)).convert("RGB").save(out, kind)
    return out.getvalue()


@pytest.fixture(autouse=True)
def few_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits for images that take no time to make."""
    monkeypatch.setattr(limits, "IMAGE_PIXELS_MAX", SIDE * SIDE)
    monkeypatch.setattr(limits, "IMAGE_JPEG_PIXELS_MAX", 4 * SIDE * SIDE)


@pytest.mark.parametrize("kind", images.FORMATS)
def test_a_image_within_the_limit_keeps_its_size(kind: str) -> None:
    assert open_image(file_of(kind, SIDE, SIDE)).size == (SIDE, SIDE)


@pytest.mark.parametrize("kind", images.FORMATS)
@pytest.mark.parametrize(("width", "height"), [(SIDE + 1, SIDE), (2 * SIDE, 2 * SIDE), (2 * SIDE + 1, 2 * SIDE)])
def test_of_larger_images_only_a_jpeg_is_taken_at_half_its_size(kind: str, width: int, height: int) -> None:
    file = file_of(kind, width, height)
    if kind == "JPEG" and width * height <= limits.IMAGE_JPEG_PIXELS_MAX:
        found = open_image(file)
        assert found.size == ((width + 1) // 2, (height + 1) // 2)
        whole = Image.open(io.BytesIO(file)).resize(found.size)
        assert max(abs(one - other) for one, other in zip(found.tobytes(), whole.tobytes(), strict=True)) < 40
        return
    with pytest.raises(ServiceError, match=f"has {width} x {height} pixels") as refused:
        open_image(file)
    assert refused.value.code == "invalid_value"
