"""Pictures are taken out of the bodies of recorded requests, and put back as they were."""

import base64
import json

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.streams.body_pictures import CutBody, WholeBody, whole_body, without_pictures
from shared.request.pictures import PictureInput

FILE = bytes(range(256)) * 30
PARTS = st.sampled_from([FILE, FILE[:1536], FILE[300:], b"small"]) | st.text(max_size=5)


def restored(cut: CutBody) -> WholeBody:
    return whole_body(cut.body, cut.pictures, cut.fetched, cut.files)


@given(st.lists(PARTS, max_size=6))
def test_a_body_is_the_same_with_its_pictures(parts: list[bytes | str]) -> None:
    texts = [part if isinstance(part, str) else base64.b64encode(part).decode() for part in parts]
    body = json.dumps(texts).encode()
    pictures = [PictureInput("", file=part) for part in parts if isinstance(part, bytes)]
    cut = without_pictures(body, pictures)
    assert restored(cut) == WholeBody(body, {}, True)
    assert len(cut.body) < 1024


def test_files_that_were_fetched_are_kept_and_missing_ones_are_told() -> None:
    url = "https://example.org/a.png"
    body = json.dumps([url, base64.b64encode(FILE).decode()]).encode()
    cut = without_pictures(body, [PictureInput("", file=FILE[:2000], url=url), PictureInput("", file=FILE)])
    assert restored(cut) == WholeBody(body, {url: FILE[:2000]}, True)
    lost = whole_body(cut.body, cut.pictures, cut.fetched, {})
    assert (json.loads(lost.body), lost.fetched, lost.is_whole) == ([url, ""], {}, False)


def test_a_picture_that_is_not_in_the_body_changes_nothing() -> None:
    escaped = json.dumps(base64.b64encode(FILE).decode()).replace("/", "\\/").encode()
    cut = without_pictures(escaped, [PictureInput("", file=FILE)])
    assert (cut.body, cut.pictures, cut.files) == (escaped, (), {})
