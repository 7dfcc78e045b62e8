from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.gateway.guests.files.multipart import FormParser, Part
from antiphon.shared.errors import ServiceError
from antiphon.shared.files import limits

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


def status_of(work: Callable[[], object]) -> int:
    """The HTTP status that a client gets."""
    try:
        work()
    except ServiceError as error:
        return error.status
    return 200


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


@given(size=st.integers(0, 3 * limits.FORM_EPILOGUE_BYTES_MAX), cut=st.integers(1, 5000))
def test_what_follows_the_end_is_not_kept_and_soon_refused(size: int, cut: int):
    parser = FormParser(CONTENT_TYPE)
    body = form([("a", "b", b"c")])[:-2] + b"x" * size
    pieces = [body[at : at + cut] for at in range(0, len(body), cut)]

    def feed() -> None:
        for piece in pieces:
            list(parser.feed(piece))
            assert not parser._ended or not parser._buffer
        parser.end()

    assert status_of(feed) == (200 if size <= limits.FORM_EPILOGUE_BYTES_MAX else 400)


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


ENCODED = [
    ("utf-8''%E2%82%AC", "€"),
    ("UTF-8'en'a%20b", "a b"),
    ("iso-8859-1''%e9", "é"),
    ("utf-8''a%00b", "a\0b"),
    ("utf-8''%ff", None),
    ("undefined''x", None),
    ("idna''x", None),
    ("a%00b''x", None),
    ("punycode''%ff%ff", None),
    ("utf-7''+2AA-", None),
    ("unicode_escape''%5cud800", None),
    ("''x", None),
]
"""Values in the form of RFC 2231, and what they mean; None: they are refused."""


@pytest.mark.parametrize(("value", "meaning"), ENCODED)
def test_encoded_parameters_are_decoded_or_refused(value: str, meaning: str | None):
    body = form([("file", "a", b"x")]).replace(b'filename="a"', b"filename*=" + value.encode())
    if meaning is not None:
        assert read([body]) == [("file", meaning, b"x")]
        return
    for broken in (body, body.replace(b'name="file"', b"name*=" + value.encode())):
        with pytest.raises(ServiceError, match="cannot be decoded: use UTF-8") as refused:
            read([broken])
        assert refused.value.status == 400
    with pytest.raises(ServiceError, match="cannot be decoded"):
        FormParser(f"multipart/form-data; boundary*={value}")


@pytest.mark.parametrize(
    "content_type",
    [f"multipart/form-data; boundary*{'9' * 5000}*=utf-8''B", "multipart/form-data; boundary*0*=x; boundary*00*=y"],
)
def test_parameters_in_odd_parts_are_refused(content_type: str):
    with pytest.raises(ServiceError) as refused:
        FormParser(content_type)
    assert refused.value.status == 400


TEXT = st.text(st.characters(codec="latin-1"), max_size=30)


@given(
    parts=st.lists(
        st.sampled_from(["boundary", "name", "filename", "*", "*0", "=", "''", ";", '"', "\\", "utf-8"]) | TEXT
    )
)
def test_whatever_a_header_has_a_client_gets_an_error_of_its_own(parts: list[str]):
    body = b"--edge\r\nContent-Disposition: form-data; " + "".join(parts).encode() + b"\r\n\r\n\r\n--edge--"
    for content_type in ("multipart/form-data; " + "".join(parts), CONTENT_TYPE):
        assert status_of(lambda content_type=content_type: read([body], content_type)) in (200, 400)
