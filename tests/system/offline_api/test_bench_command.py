"""`antiphon bench`: latency and throughput of a model in the process, and a load on a server."""

import json
from pathlib import Path

import pytest

from antiphon.benchmark.figures import percentile, spread
from antiphon.benchmark.load import arrivals, prompts
from antiphon.cli import main
from tests.system.served import Served

ENGINE = ("--kv-cache-memory-gb=0.05", "--threads=1", "--max-num-seqs=4")
LENGTHS = ("--input-len=12", "--output-len=5")


def figures(path: Path) -> dict[str, float]:
    return json.loads(path.read_text())


def test_the_latency_of_a_batch_and_the_throughput_of_many_prompts(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    common = (f"--model={model}", f"--output-json={out}", *ENGINE, *LENGTHS)
    assert main(["bench", "latency", *common, "--batch-size=3", "--num-iters-warmup=1", "--num-iters=4"]) == 0
    found = figures(out)
    assert (found["batch_size"], found["iterations"]) == (3, 4)
    assert 0 < found["p50_latency_ms"] <= found["p99_latency_ms"]
    assert "p99_latency_ms" in capfd.readouterr().out
    assert main(["bench", "throughput", *common, "--num-prompts=9"]) == 0
    found = figures(out)
    assert found["requests"] == 9
    assert found["output_tokens_per_s"] == pytest.approx(9 * 5 / found["duration_s"])
    assert found["total_tokens_per_s"] == pytest.approx(9 * 17 / found["duration_s"])


@pytest.mark.parametrize("flags", [(), ("--request-rate=40",), ("--max-concurrency=2",)])
def test_a_load_on_a_server_counts_every_request_and_token(
    served: Served, tmp_path: Path, flags: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    words = ["bench", "serve", f"--base-url={served.url}", "--num-prompts=12", f"--output-json={out}", *LENGTHS, *flags]
    # The small model's vocabulary ends below the ids that prompts are made of.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("antiphon.benchmark.serving.VOCAB_SIZE", 300)
        assert main([*words, "--json"]) == 0
    found = figures(out)
    assert json.loads(capfd.readouterr().out) == found
    assert found["requests"] == 12
    assert found["output_tokens_per_s"] == pytest.approx(12 * 5 / found["duration_s"])
    assert 0 < found["p50_ttft_ms"] <= found["p99_ttft_ms"]
    assert found["mean_tpot_ms"] >= 0
    assert ("mean_wait_ms" in found) == ("--max-concurrency=2" in flags)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("latency", "--input-len=0"), 2, "--input-len: 0 is not at least 1"),
        (("latency", "--model=/nowhere"), 2, "/nowhere"),
        (("throughput", "--input-len=9999999"), 2, "the context is"),
        (("serve", "--request-rate=0"), 2, "--request-rate: 0.0 is not above 0"),
        (("serve", "--base-url=ftp://x"), 2, "is no URL"),
        (("serve", "--server=http://127.0.0.1:1"), 3, "no connection to http://127.0.0.1:1"),
    ],
)
def test_a_wrong_call_says_why(words: tuple[str, ...], code: int, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == code
    assert said in capfd.readouterr().err


def test_requests_that_fail_are_told_of(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "serve", f"--base-url={served.url}", "--model=nobody", "--num-prompts=3", *LENGTHS]
    assert main(words) == 1
    assert "3 of 3 requests failed. The first: HTTP/1.1 404" in capfd.readouterr().err


def test_prompts_and_arrivals_are_those_of_the_seed() -> None:
    assert prompts(3, 5, 300, 1) == prompts(3, 5, 300, 1) != prompts(3, 5, 300, 2)
    assert all(10 <= token < 300 for prompt in prompts(3, 50, 300, 1) for token in prompt)
    moments = arrivals(2000, 10.0, 1)
    assert moments == sorted(moments) == arrivals(2000, 10.0, 1)
    assert moments[-1] == pytest.approx(200, rel=0.1)
    assert arrivals(3, float("inf"), 1) == [0.0, 0.0, 0.0]


def test_without_durations_there_are_no_figures() -> None:
    assert spread("itl", []) == {}
    assert spread("itl", [0.001, 0.003])["mean_itl_ms"] == pytest.approx(2.0)


def test_a_percentile_is_interpolated() -> None:
    assert [percentile([4.0, 1.0, 3.0, 2.0], percent) for percent in (0, 50, 100)] == [1.0, 2.5, 4.0]
    assert percentile([], 50) != percentile([], 50)
