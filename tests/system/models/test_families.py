"""Models of every kind through the whole system: the tokens of the reference, on engines that pass them on and die."""

from pathlib import Path

import pytest

from tests.model.harness import VARIANTS
from tests.models import make_model
from tests.support.slow import slow_but
from tests.system.models.greedy_streams import counted, expected, read
from tests.system.served import serve_tiny, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.model, pytest.mark.timeout(300)]
KINDS = (
    "lfm2", "lfm2 with experts", "lfm3",
    "qwen3_5", "qwen3_5 with experts", "qwen3_next", "kimi_linear",
    "gemma3n", "gemma4", "gemma4 with layers that share keys", "gemma4 with experts",
    "mamba", "falcon_mamba", "mamba2", "granite with state spaces and experts", "bamba", "falcon_h1", "jamba",
    "nemotron_h with experts",
    "ministral3", "deepseek_v3 with wide latents", "llama4",
    "granite with experts beside a shared one", "olmoe", "apertus", "arcee",
)  # fmt: skip
QUICK_KINDS = (
    "lfm2",
    "qwen3_5",
    "gemma4 with layers that share keys",
    "mamba2",
    "deepseek_v3 with wide latents",
    "llama4",
)
FLAGS = ("--dtype=float32", "--block-size=16", "--threads=1", "--swap-space=0.02", "--prefill=1", "--decode=2")
LOADED = "antiphon:engine_kv_loaded_tokens"
TEXT = "What a prefill engine has computed of this sentence goes to a decode engine, which then dies. "


@pytest.mark.parametrize("kind", slow_but(QUICK_KINDS, KINDS))
def test_streams_pass_from_engine_to_engine_with_the_tokens_of_the_reference(kind: str, tmp_path: Path) -> None:
    family, fields = VARIANTS[kind]
    model = make_model(tmp_path, family, **fields)
    prompts = [f"{number} {TEXT}{number}" for number in range(4)]
    with until_the_end(serve_tiny(model, *FLAGS)) as served:
        right = [expected(model, prompt, 200) for prompt in prompts]
        assert read(served, prompts, 200) == right
        wait_until(lambda: counted(served, LOADED, "decode-") > 0, 60, lambda: served.output)
        assert not counted(served, "antiphon:engine_kv_failed_loads", "decode-")
        assert "through transformers" not in served.output
        assert read(served, prompts, 200, killed="decode-") == right
