"""Images are taken out of the bodies of recorded requests, and put back as they were."""

import base64
import json

from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.gateway.guests.resume.body_images import CutBody, WholeBody, whole_body, without_images
from antiphon.shared.request.images import ImageInput

FILE = bytes(range(256)) * 30
PARTS = st.sampled_from([FILE, FILE[:1536], FILE[300:], b"small"]) | st.text(max_size=5)


def restored(cut: CutBody) -> WholeBody:
    return whole_body(cut.body, cut.images, cut.fetched, cut.files)


@given(st.lists(PARTS, max_size=6))
def test_a_body_is_the_same_with_its_images(parts: list[bytes | str]) -> None:
    texts = [part if isinstance(part, str) else base64.b64encode(part).decode() for part in parts]
    body = json.dumps(texts).encode()
    images = [ImageInput("", file=part) for part in parts if isinstance(part, bytes)]
    cut = without_images(body, images)
    assert restored(cut) == WholeBody(body, {}, True)
    assert len(cut.body) < 1024


def test_files_that_were_fetched_are_kept_and_missing_ones_are_told() -> None:
    url = "https://example.org/a.png"
    body = json.dumps([url, base64.b64encode(FILE).decode()]).encode()
    cut = without_images(body, [ImageInput("", file=FILE[:2000], url=url), ImageInput("", file=FILE)])
    assert restored(cut) == WholeBody(body, {url: FILE[:2000]}, True)
    lost = whole_body(cut.body, cut.images, cut.fetched, {})
    assert (json.loads(lost.body), lost.fetched, lost.is_whole) == ([url, ""], {}, False)


ESCAPES = st.fixed_dictionaries(
    {
        "/": st.sampled_from(["/", "\\/", "\\u002f", "\\u002F"]),
        "+": st.sampled_from(["+", "\\u002b", "\\u002B"]),
        "=": st.sampled_from(["=", "\\u003d", "\\u003D"]),
    }
)


@given(st.lists(st.tuples(PARTS, ESCAPES), max_size=6))
def test_a_image_is_taken_out_as_its_client_escaped_it(parts: list[tuple[bytes | str, dict[str, str]]]) -> None:
    texts = list[str]()
    for part, escapes in parts:
        text = json.dumps(part if isinstance(part, str) else base64.b64encode(part).decode())
        for plain, escaped in escapes.items():
            text = text.replace(plain, escaped)
        texts.append(text)
    body = f"[{','.join(texts)}]".encode()
    cut = without_images(body, [ImageInput("", file=part) for part, _ in parts if isinstance(part, bytes)])
    assert restored(cut) == WholeBody(body, {}, True)
    assert len(cut.body) < 1024


def test_the_files_of_a_body_with_escapes_are_kept_once() -> None:
    text = json.dumps(base64.b64encode(FILE).decode())
    body = f"[{text},{text.replace('/', chr(92) + '/')}]".encode()
    cut = without_images(body, [ImageInput("", file=FILE)])
    assert (cut.body, list(cut.files.values())) == (b'["",""]', [FILE])
    assert json.loads(restored(cut).body) == json.loads(body)


def test_a_image_that_is_not_in_the_body_changes_nothing() -> None:
    body = json.dumps(base64.b64encode(FILE).decode()).encode()
    cut = without_images(body, [ImageInput("", file=FILE[::-1])])
    assert (cut.body, cut.images, cut.files) == (body, (), {})
