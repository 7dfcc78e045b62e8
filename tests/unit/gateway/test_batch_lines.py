"""The lines of batch files: what is read, what is refused, and that a long line is never in memory as a whole."""

import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.batch import keep_whole_lines, read_requests
from antiphon.services.gateway.guests.batches.answers import keep_whole_answers
from antiphon.services.gateway.guests.batches.requests import InputCheck, RequestReader
from antiphon.shared.files import limits
from antiphon.shared.files.batch_lines import (
    BatchLineError,
    answered,
    encoded_answer,
    read_answer,
    read_request,
    request_lines,
    unanswered,
)
from antiphon.shared.flags import SettingsError

URL = "/v1/completions"


def request_line(custom_id: str, body: Any, **fields: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "url": URL, "body": body, **fields}).encode() + b"\n"


def check(path: Path) -> InputCheck:
    found = InputCheck(path, URL)
    for _ in found.steps():
        pass
    return found


def errors(path: Path) -> list[tuple[int | None, str]]:
    return [(error.line, error.message) for error in check(path).errors]


class Watched(io.BytesIO):
    """A file that remembers how much was read at once."""

    longest = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        assert size > 0
        line = super().readline(size)
        self.longest = max(self.longest, len(line))
        return line


# --- requests ---


def test_a_request_is_read_and_its_body_is_kept_as_it_is():
    body = '{"prompt" : "x\\u00e9", "temperature":1e0,  "a":[1.50]}'
    line = f'{{"custom_id": "a", "method": "POST", "url": "{URL}", "body": {body}}}\n'
    request = read_request(line.encode(), (URL,))
    assert (request.custom_id, request.url, request.body) == ("a", URL, body.encode())


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "not JSON"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": ' + "[" * 100_000, "not JSON"),
        ("[]", "not a request: Expected `object`, got `array`"),
        ('{"url": "/v1/completions", "body": {}}', "'custom_id' must be a text"),
        ('{"custom_id": 3, "url": "/v1/completions", "body": {}}', "custom_id"),
        (
            '{"custom_id": "%s", "url": "/v1/completions", "body": {}}' % ("x" * 513),
            "'custom_id' must be a text of 1 to",
        ),
        ('{"custom_id": "a", "url": "/v1/nope", "body": {}}', "'url' one of /v1/completions"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}', "'method' must be POST"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": []}', "'body' is not valid: Expected `object`"),
        ('{"custom_id": "a", "url": "/v1/completions"}', "'body' is not valid: Expected `object`, got `null`"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', "'stream' is not possible"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {"stream": {}}}', "'body' is not valid: .*stream"),
    ],
)
def test_a_wrong_line_is_refused(line: str, told: str):
    with pytest.raises(BatchLineError, match=told):
        read_request(line.encode(), (URL,))


def test_only_a_line_feed_ends_a_line_for_the_command_and_the_gateway(tmp_path: Path):
    path, prompts = tmp_path / "in.jsonl", ["a\u2028b", "a\x85b", "x", "y"]
    lines = [
        json.dumps({"custom_id": f"c{number}", "url": URL, "body": {"prompt": prompt}}, ensure_ascii=False)
        for number, prompt in enumerate(prompts)
    ]
    path.write_bytes(("\n".join(lines[:2]) + "\n\r\n" + "\r\n".join(lines[2:])).encode())
    assert [json.loads(one.body)["prompt"] for one in read_requests(path)] == prompts
    assert (check(path).total, errors(path)) == (4, [])
    path.write_bytes(path.read_bytes() + b"\n\n{\xff")
    with pytest.raises(SettingsError, match="line 7: the line is not JSON"):
        read_requests(path)
    assert [line for line, _ in errors(path)] == [7]


@given(
    pieces=st.lists(st.sampled_from([b"\n", b"x", b"y" * 7, b" ", b"z" * 30])),
    max_bytes=st.integers(1, 12),
)
def test_lines_are_those_of_the_file_and_a_long_one_is_cut_and_never_read_as_a_whole(
    pieces: list[bytes], max_bytes: int
):
    data = b"".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "BATCH_LINE_BYTES_MAX", max_bytes)
        file = Watched(data)
        found = list(request_lines(file))
    whole = data.splitlines(keepends=True)
    assert [one.data for one in found] == [line[: max_bytes + 1] for line in whole]
    assert [one.number for one in found] == list(range(1, len(whole) + 1))
    assert all(data.startswith(one.data, one.start) for one in found)
    assert file.longest <= max_bytes + 1


def test_a_line_that_is_too_long_is_an_error_of_that_line_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "BATCH_LINE_BYTES_MAX", 100)
    path = tmp_path / "in.jsonl"
    path.write_bytes(request_line("a", {}) + request_line("b", {"prompt": "x" * 1000}) + request_line("c", {}))
    assert errors(path) == [(2, "Line 2: the line is longer than 100 bytes.")]
    assert check(path).total == 2
    with pytest.raises(SettingsError, match="line 2: the line is longer than 100 bytes"):
        read_requests(path)


def test_a_body_takes_no_more_memory_than_its_text(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    line = request_line("a", {"x": [[] for _ in range(2**19)]})
    path.write_bytes(line)
    tracemalloc.start()
    try:
        assert (check(path).total, errors(path)) == (1, [])
        reader = RequestReader(path, URL, frozenset())
        [waiting] = reader.next()
        assert len(reader.request(waiting).body) > 2**20
        reader.close()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The line and its body. As lists of Python it would take 25 times as much.
    assert peak < 4 * len(line)


def test_a_request_that_waits_has_no_body_in_memory(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    lines = [request_line(f"c{number}", {"prompt": f"{number}" * 100}) for number in range(200)]
    path.write_bytes(b"\n".join(lines))
    reader = RequestReader(path, URL, {hash("c3")})
    waiting = []
    while not reader.has_ended:
        found = reader.next()
        assert len(found) <= limits.BATCH_CONCURRENCY
        waiting += found
    assert [one.custom_id for one in waiting] == [f"c{number}" for number in range(200) if number != 3]
    assert all(sum(map(len, map(str, one))) < 40 for one in waiting)
    assert json.loads(reader.request(waiting[100]).body) == {"prompt": "101" * 100}
    reader.close()


def test_an_input_of_blank_lines_is_not_read_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "BATCH_LINES_MAX", 10)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n" * 9 + request_line("a", {}))
    assert errors(path) == []
    path.write_bytes(b"\n" * 10_000)
    assert errors(path) == [(11, "Line 11: an input file must not have more than 10 lines.")]
    assert len(list(InputCheck(path, URL).steps())) == 10


def test_errors_and_requests_of_an_input_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "BATCH_REQUESTS_MAX", 2)
    monkeypatch.setattr(limits, "BATCH_ERRORS_MAX", 3)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(request_line(f"c{number}", {}) for number in range(9)))
    assert [line for line, _ in errors(path)] == [3, 4, 5]
    assert "more than 2 requests" in errors(path)[0][1]
    path.write_bytes(request_line("a", {}) * 2 + request_line("b", {"background": True}))
    assert [told.partition(": ")[2] for _, told in errors(path)] == [
        "the custom_id 'a' is used twice.",
        "'background' is not possible in a batch.",
    ]


# --- answers ---


def test_an_answer_is_read_back_as_it_was_written():
    good = answered("a", 200, "r1", b'{\n"a": 1.50}\n')
    data, is_good = encoded_answer(good)
    assert is_good
    assert data.count(b"\n") == 1
    assert b'"a": 1.50}' in data
    assert json.loads(data)["response"] == {"status_code": 200, "request_id": "r1", "body": {"a": 1.5}}
    assert read_answer(data) == ("a", True)
    for bad in (answered("b", 400, "r2", b"{}"), unanswered("c", "batch_expired", "Too late.")):
        data, is_good = encoded_answer(bad)
        assert (read_answer(data), is_good) == ((bad["custom_id"], False), False)
    assert len({json.loads(encoded_answer(one)[0])["id"] for one in (good, answered("a", 200, "r", b"1"))}) == 2


@pytest.mark.parametrize(
    "damaged", [b"[]\n", b"{}\n", b"\n", b"\xff\n", b'{"custom_id": "a"}\n', b"[" * 100_000 + b"\n"]
)
def test_a_line_that_is_no_answer_is_none(damaged: bytes):
    assert read_answer(damaged) is None


def test_an_answer_that_is_too_large_becomes_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "BATCH_ANSWER_BYTES_MAX", 300)
    data, is_good = encoded_answer(answered("a", 200, "r", msgspec.json.encode("x" * 300)))
    assert not is_good
    assert json.loads(data)["error"]["code"] == "answer_too_large"
    assert read_answer(data) == ("a", False)
    assert read_answer(encoded_answer(answered("a", 200, "r", b"1"))[0][:-1] + b" " * 300 + b"\n") is None


LINES = [encoded_answer(answered(name, 200, "r", b"{}"))[0] for name in "abcd"]
GARBAGE = [b"\n", b"{}\n", b"\x00\xff\n", LINES[0][:-9] + b"\n", LINES[1][:20] + LINES[2]]
TAILS = [b"", LINES[3][:-1], b"\x00" * 100, LINES[3][:30] + b"\x00" * 100]


@given(
    lines=st.lists(st.sampled_from([*LINES, *GARBAGE])),
    tail=st.sampled_from(TAILS),
    stop_after=st.integers(0, 12),
)
def test_what_is_no_answer_is_removed_and_the_rest_kept_even_if_that_is_interrupted(
    lines: list[bytes], tail: bytes, stop_after: int, tmp_path_factory: pytest.TempPathFactory
):
    path = tmp_path_factory.mktemp("answers") / "part"
    path.write_bytes(b"".join(lines) + tail)
    steps = keep_whole_answers(path, set())
    for _ in zip(range(stop_after), steps, strict=False):
        pass
    steps.close()  # type: ignore[attr-defined]
    ids = set[int]()
    for _ in keep_whole_answers(path, ids):
        pass
    expected = list(dict.fromkeys(line for line in lines if line in LINES))
    assert path.read_bytes() == b"".join(expected)
    assert ids == {hash(json.loads(line)["custom_id"]) for line in expected}


def test_the_command_keeps_whole_lines_and_refuses_a_file_that_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "out.jsonl"
    assert keep_whole_lines(path) == {}
    bad = encoded_answer(answered("z", 400, "r", b"{}"))[0]
    path.write_bytes(b"".join(LINES) + b"\n" + bad + b'{"custom')
    assert keep_whole_lines(path) == dict.fromkeys("abcd", True) | {"z": False}
    assert path.read_bytes() == b"".join(LINES) + b"\n" + bad
    path.write_bytes(LINES[0] + b"[]\n" + LINES[1])
    with pytest.raises(SettingsError, match="line 2 is no answer of a batch: name another file"):
        keep_whole_lines(path)
    monkeypatch.setattr(limits, "BATCH_ANSWER_BYTES_MAX", len(LINES[0]))
    path.write_bytes(LINES[0] + b"x" * 1000)
    with pytest.raises(SettingsError, match="line 2 is no answer"):
        keep_whole_lines(path)
    assert len(path.read_bytes()) == len(LINES[0]) + 1000
