"""The server of OpenVINO GenAI in the benchmarks, over HTTP, with the benchmarks' own client.

GenAI is replaced by a module that generates numbers, because the environment of the tests lacks it and it has no models
as small as a test needs.
"""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.benchmark.load import run
from bench.harness.serving import Server
from bench.peer_systems.peer_servers import OPENVINO_SERVER, OpenVino

GENAI = """
class GenerationConfig: pass
class SchedulerConfig: pass
class Tokens:
    def __init__(self, ids): self.input_ids, self.ids, self.shape = self, ids, (1, len(ids))
class Output:
    def __init__(self, ids): self.generated_ids = ids
class Tokenizer:
    def encode(self, text, add_special_tokens): return Tokens(text.split())
    def decode(self, tokens): return [" ".join(str(id) for id in ids) for ids in tokens]
class Handle:
    def __init__(self, left): self.left, self.new = left, []
    def can_read(self): return bool(self.new)
    def read(self):
        ids, self.new = self.new, []
        return {0: Output(ids)}
class ContinuousBatchingPipeline:
    def __init__(self, model, scheduler, device):
        assert (scheduler.cache_size, scheduler.enable_prefix_caching, device) == (4, True, "CPU")
        self.running = []
    def get_tokenizer(self): return Tokenizer()
    def add_request(self, number, tokens, config):
        assert config.ignore_eos and not config.do_sample
        if tokens.ids == ["fail"]: raise RuntimeError("it cannot")
        self.running.append(Handle(config.max_new_tokens))
        return self.running[-1]
    def step(self):
        for handle in self.running:
            handle.new.append(handle.left)
            handle.left -= 1
        self.running = [handle for handle in self.running if handle.left]
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    (tmp_path / "openvino_genai.py").write_text(GENAI, encoding="utf-8")
    environment = {"PYTHONPATH": str(tmp_path)}
    monkeypatch.setattr("bench.peer_systems.peer_servers.openvino_environment", lambda: environment)
    with OpenVino(Path(sys.executable), tmp_path / "a-model") as found:
        yield found


def test_requests_at_once_get_all_their_tokens_one_by_one(server: Server) -> None:
    assert server.model_name() == "a-model"
    assert server.get("/elsewhere")[0] == 404
    bodies = [{"prompt": "some words " * (n + 1), "max_tokens": 3 + n} for n in range(6)]
    result = asyncio.run(run(server.host, server.port, bodies, 4))
    assert not result.errors
    assert result.prompt_tokens == 2 * sum(range(1, 7))
    assert result.output_tokens == sum(range(3, 9))
    assert len(result.chunk_gaps_s) == sum(range(2, 8))


def test_it_ends_if_the_pipeline_fails(server: Server) -> None:
    bodies = [{"prompt": "fail", "max_tokens": 1}]
    result = asyncio.run(run(server.host, server.port, bodies, 1))
    assert result.errors == ["a stream ended without usage"]
    assert server.process.wait(60) != 0
    assert "it cannot" in server.output()


def test_it_imports_nothing_of_this_project() -> None:
    text = OPENVINO_SERVER.read_text(encoding="utf-8")
    assert "import bench" not in text
    assert "from bench" not in text
    assert "antiphon" not in text
