"""`antiphon run-batch` and `antiphon complete`, as a user calls them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from antiphon.cli import main
from tests.system.observability.test_metrics import scrape
from tests.system.served import Served, fetch, serve_tiny, until_the_end, wait_until

ROWS = 4
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    with until_the_end(serve_tiny(model, f"--max-num-seqs={ROWS}")) as started:
        yield started


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_requests(path: Path, count: int) -> None:
    texts = (f"{'word ' * (1 + number % 7)}{number}" for number in range(count))
    bodies = [{"model": "tiny", "prompt": text, "max_tokens": 4, "temperature": 0} for text in texts]
    requests = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": b} for i, b in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))


def test_every_request_is_answered_in_order_and_a_second_run_asks_for_the_rest_only(
    served: Served, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_requests(source, 40)
    arguments = ["run-batch", str(source), str(target), "--server", served.url, "--concurrency=16"]
    assert main(arguments) == 0
    whole = lines(target)
    assert [one["custom_id"] for one in whole] == [f"r{i}" for i in range(40)]
    assert all(one["response"]["status_code"] == 200 and one["error"] is None for one in whole)
    assert "40/40" in capfd.readouterr().err
    # Interrupted while the eleventh answer was being written.
    kept = "".join(json.dumps(one) + "\n" for one in whole[:10])
    target.write_text(kept + json.dumps(whole[10])[:30])
    assert main(arguments) == 0
    again = lines(target)
    assert again[:10] == whole[:10]
    texts = [[one["response"]["body"]["choices"][0]["text"] for one in each] for each in (whole, again)]
    assert texts[0] == texts[1]
    assert "10 answered already" in capfd.readouterr().err
    assert main(arguments) == 0


def test_a_refused_request_has_the_servers_error_and_the_command_says_so(served: Served, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [{"model": "nobody", "prompt": "x"}, {"model": "tiny", "prompt": "x", "max_tokens": 1}]
    source.write_text(
        "\n".join(json.dumps({"custom_id": str(i), "url": "/v1/completions", "body": b}) for i, b in enumerate(bodies))
    )
    assert main(["run-batch", str(source), str(target), "--server", served.url]) == 1
    refused, good = lines(target)
    assert refused["response"]["status_code"] == 404
    assert refused["response"]["body"]["error"]["code"] == "model_not_found"
    assert good["response"]["status_code"] == 200


def test_lines_may_ask_for_embeddings(served: Served, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = {"custom_id": "v", "url": "/v1/embeddings", "body": {"model": "tiny", "input": ["one", "two"]}}
    source.write_text(json.dumps(line))
    assert main(["run-batch", str(source), str(target), "--server", served.url]) == 0
    [answer] = lines(target)
    assert [len(one["embedding"]) for one in answer["response"]["body"]["data"]] == [64, 64]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1: the line is not JSON"),
        ('{"custom_id": "a", "url": "/v1/nope", "body": {}}', "line 1: 'method' must be POST and 'url' one of"),
        ('{"url": "/v1/completions", "body": {}}', "line 1: 'custom_id' must be a text"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', "'stream' is not possible"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {}}\n' * 2, "custom_id 'a' is used twice"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_asked(
    text: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text(text)
    assert main(["run-batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]) == 2
    assert said in capfd.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_an_output_file_that_is_none_is_left_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_requests(source, 1)
    target.write_text("my diary\n")
    assert main(["run-batch", str(source), str(target)]) == 2
    assert "is no answer of a batch" in capfd.readouterr().err
    assert target.read_text() == "my diary\n"


def test_a_text_is_continued_in_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["complete", "What is 12 + 7?", "--chat", "--temperature=0", "--dtype=float32"]
    assert main(words) == 0
    assert capfd.readouterr().out == "12 + 7 = 19.\n"
    assert main(["complete", "x", "--temperature=5"]) == 2
    assert "'temperature' must be between 0 and 2" in capfd.readouterr().err
    assert main(["complete", "x", "--model=/nowhere"]) == 2
    assert "/nowhere" in capfd.readouterr().err


def test_a_batch_gives_its_rows_to_requests_that_somebody_waits_for_and_ends_with_the_same_answers(
    served: Served, client: openai.OpenAI
) -> None:
    asked = [
        {"model": "tiny", "prompt": f"number {n}", "max_tokens": 250, "ignore_eos": True, "seed": n} for n in range(30)
    ]
    lines = [{"custom_id": str(n), "url": COMPLETIONS, "body": body} for n, body in enumerate(asked)]
    data = "\n".join(json.dumps({"method": "POST", **line}) for line in lines).encode()
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    before = scrape(served)["antiphon:engine_idle_preemptions_total"]
    batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
    wait_until(lambda: scrape(served)["antiphon:engine_idle_running"] == ROWS, 60)

    def took_a_row() -> bool:
        answer = fetch(served, "POST", COMPLETIONS, {"prompt": "now", "max_tokens": 3, "service_tier": "default"})
        assert (answer.status, answer.json["service_tier"]) == (200, "default")
        return scrape(served)["antiphon:engine_idle_preemptions_total"] > before

    # The first request may find a row free, because the sequences that began together end together.
    wait_until(took_a_row, 60)
    assert client.batches.retrieve(batch.id).status == "in_progress", "the answer came first"
    flex = client.completions.create(model="tiny", prompt="later", max_tokens=3, extra_body={"service_tier": "flex"})
    assert flex.model_dump()["service_tier"] == "flex"
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 120)
    ended = client.batches.retrieve(batch.id)
    assert ended.output_file_id is not None
    found = [json.loads(line) for line in client.files.content(ended.output_file_id).text.splitlines()]
    texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in found}
    assert len(texts) == len(found) == len(asked)
    for number in (0, 1, 2, 3, 29):
        alone = fetch(served, "POST", COMPLETIONS, asked[number])
        assert texts[str(number)] == alone.json["choices"][0]["text"]


def test_an_unknown_tier_or_lane_is_refused_by_name(served: Served) -> None:
    refused = fetch(served, "POST", COMPLETIONS, {"prompt": "x", "service_tier": "cheap"})
    assert (refused.status, refused.json["error"]["param"]) == (400, "service_tier")
    refused = fetch(served, "POST", "/generate", {"prompt": "x"}, **{"X-Antiphon-Lane": "fast"})
    assert (refused.status, refused.json["error"]["param"]) == (400, "X-Antiphon-Lane")
