from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.files.multipart import FormParser, Part
from shared import limits
from shared.errors import ServiceError

BOUNDARY = "edge"
CONTENT_TYPE = f'multipart/form-data; boundary="{BOUNDARY}"'
Field = tuple[str, str | None, bytes]


def form(fields: Iterable[Field], preamble: bytes = b"") -> bytes:
    """A form as clients write it."""
    lines = [preamble]
    for name, filename, data in fields:
        named = f'; filename="{filename}"' if filename is not None else ""
        head = f'Content-Disposition: form-data; name="{name}"{named}\r\nContent-Type: text/plain'.encode()
        lines.append(b"--%s\r\n%s\r\n\r\n%s\r\n" % (BOUNDARY.encode(), head, data))
    return b"".join(lines) + f"--{BOUNDARY}--\r\n".encode()


def read(pieces: Iterable[bytes], content_type: str = CONTENT_TYPE) -> list[Field]:
    parser, found = FormParser(content_type), list[Field]()
    for piece in pieces:
        for event in parser.feed(piece):
            if isinstance(event, Part):
                found.append((event.name, event.filename, b""))
            else:
                name, filename, data = found.pop()
                found.append((name, filename, data + event))
    parser.end()
    return found


NAMES = st.text("abc[]", min_size=1, max_size=5)
DATA = st.lists(st.sampled_from([b"\r", b"\n", b"-", b"--edge", b"edge", b"\r\n--edg", b"x" * 50])).map(b"".join)


@given(
    fields=st.lists(st.tuples(NAMES, st.none() | NAMES, DATA.filter(lambda data: b"\r\n--edge" not in b"\r\n" + data))),
    sizes=st.lists(st.integers(1, 40), min_size=1),
)
def test_any_cut_of_the_body_gives_the_same_fields(fields: list[Field], sizes: list[int]):
    fields = fields[: limits.FORM_PARTS_MAX]
    body, pieces = form(fields), list[bytes]()
    while body:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(body[:size])
        body = body[size:]
    assert read(pieces) == fields


def test_text_before_the_first_and_after_the_last_boundary_is_ignored():
    fields: list[Field] = [("a", "b", b"c")]
    assert read([form(fields, b"Read this with a form reader.\r\n") + b"The end."]) == fields


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--edge",
        form([("a", None, b"")])[:-4],
        form([("a", None, b"")]).replace(b"name", b"nome"),
        form([("a", None, b"")]).replace(b"--edge\r\n", b"--edges\r\n"),
        form([(f"a{number}", None, b"") for number in range(limits.FORM_PARTS_MAX + 1)]),
        b"--edge\r\n" + b"x" * (limits.FORM_HEADER_BYTES_MAX + 1),
    ],
)
def test_a_malformed_form_is_refused(body: bytes):
    with pytest.raises(ServiceError, match="malformed"):
        read([body])


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=x"])
def test_a_body_that_is_no_form_is_refused(content_type: str):
    with pytest.raises(ServiceError, match="must be a form"):
        FormParser(content_type)
