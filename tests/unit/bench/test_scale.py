"""The benchmark of what a core carries: real services, and an engine that computes nothing."""

import pytest

from bench import scale

pytestmark = pytest.mark.nats


def test_every_stream_gets_its_tokens_and_every_part_its_figure() -> None:
    with scale.started() as parts:
        found = scale.measure(parts, streams=3, prompt=40, output=5)
        used = parts.cpu_seconds()
    assert (found["tokens"], found["prompt_tokens"]) == (15, 120)
    assert set(found["cpu_s"]) == {"gateway", "tokenizer", "detokenizer", "nats-server", "engine"}
    assert all(used[part] > 0 for part in ("gateway", "tokenizer", "detokenizer", "engine"))
    text = scale.text({"loads": [found]})
    assert all(part in text for part in scale.PARTS)
