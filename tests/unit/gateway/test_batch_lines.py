import json
from pathlib import Path

import pytest

from antiphon.batch import read_requests
from services.gateway.batches import requests
from shared.config import SettingsError
from shared.request.batch_lines import BatchLineError, answered, read_answers, read_request, unanswered

URL = "/v1/completions"


def test_a_request_is_read():
    line = {"custom_id": "a", "method": "POST", "url": URL, "body": {"prompt": "x"}}
    request = read_request(json.dumps(line), (URL,))
    assert (request.custom_id, request.url, request.body) == ("a", URL, {"prompt": "x"})


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"url": "/v1/completions", "body": {}}', "'custom_id' must be a text"),
        ('{"custom_id": "a", "url": "/v1/nope", "body": {}}', "'url' one of /v1/completions"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}', "'method' must be POST"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": []}', "'body' must be an object"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', "without 'stream'"),
    ],
)
def test_a_wrong_line_is_refused(line: str, told: str):
    with pytest.raises(BatchLineError, match=told):
        read_request(line, (URL,))


def test_only_a_line_feed_ends_a_line_for_the_command_and_the_gateway(tmp_path: Path):
    path, prompts = tmp_path / "in.jsonl", ["a\u2028b", "a\x85b", "x", "y"]
    lines = [
        json.dumps({"custom_id": f"c{number}", "url": URL, "body": {"prompt": prompt}}, ensure_ascii=False)
        for number, prompt in enumerate(prompts)
    ]
    path.write_bytes(("\n".join(lines[:2]) + "\n\r\n" + "\r\n".join(lines[2:])).encode())
    assert [one.body["prompt"] for one in read_requests(path)] == prompts
    assert requests.check(path, URL) == (4, [])
    path.write_bytes(path.read_bytes() + b"\n\n{\xff")
    with pytest.raises(SettingsError, match="line 7: the line is not JSON"):
        read_requests(path)
    assert [error.line for error in requests.check(path, URL).errors] == [7]
    answers = b"".join(json.dumps(answered(one, 200, "r", one), ensure_ascii=False).encode() + b"\n" for one in prompts)
    assert read_answers(answers) == (answers, dict.fromkeys(prompts, True))


def test_answers_are_read_back_up_to_the_last_whole_line():
    lines = [answered("a", 200, "r1", {}), answered("b", 400, "r2", {}), unanswered("c", "batch_expired", "Too late.")]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    assert read_answers(data + b'{"custom') == (data, {"a": True, "b": False, "c": False})
    assert len({line["id"] for line in lines}) == 3
    with pytest.raises(BatchLineError, match="line 1 is no answer"):
        read_answers(b"[]\n")
