"""`antiphon plan` and `antiphon doctor --sizing`: the source's table, and a model's own against known cards."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from antiphon.advice import sizing
from antiphon.advice.sizing import CARDS, Card, chosen_card, on_card
from antiphon.cli import main
from antiphon.services.vision.encoder import load_encoder
from antiphon.settings import ServeSettings
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import SettingsError
from antiphon.shared.models import overrides
from tests.models import make_model
from tests.unit.antiphon.test_device_checks import TWO, program, programs, smi
from tests.vision_models import make_vision_model

__all__ = ("programs",)
BY_NAME = {card.name: card for card in CARDS}
COMMON = {"torch_dtype": "bfloat16", "vocab_size": 152064, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
SIZES: dict[str, dict[str, Any]] = {
    "6-8B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "heads": (28, 4)},
    "12-14B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "heads": (40, 8)},
    "65-72B": {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "heads": (64, 8)},
}
"""Qwen 2.5 with 7, 14 and 72 billion parameters."""


@pytest.fixture
def model(tmp_path: Path):
    """Writes the config.json of a model of that size, without weights."""

    def make(size: str, **fields: Any) -> Path:
        (directory := tmp_path / size).mkdir(exist_ok=True)
        heads, kv_heads = SIZES[size]["heads"]
        config = {"architectures": ["Qwen2ForCausalLM"], **COMMON, **SIZES[size], **fields}
        config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    return make


def recommended(told: str) -> set[str]:
    """The words of the recommended command."""
    [line] = [line for line in told.splitlines() if line.startswith("Recommended for ")]
    return set(line.partition(": ")[2].split())


@pytest.mark.spec("S-DEP-020", "S-DEP-021", "S-DEP-022", "S-DEP-024")
def test_the_doctor_prints_the_table_of_the_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--sizing"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    told = {line[0].rstrip(":"): " ".join(line[1:]) for line in lines}
    assert told == {
        "6-8B": "L20 x1, A10 x1, A100 x1, V100 x1",
        "12-14B": "L20 x1, A10 x2, A100 x1, V100 x2",
        "65-72B": "L20 x8, A100 x8",
    }


@pytest.mark.parametrize(
    ("size", "cards"),
    [
        pytest.param("6-8B", {"L20": 1, "A10": 1, "A100 40G": 1, "V100 32G": 1}, marks=pytest.mark.spec("S-DEP-020")),
        pytest.param("12-14B", {"L20": 1, "A10": 2, "A100 40G": 1, "V100 32G": 2}, marks=pytest.mark.spec("S-DEP-021")),
        pytest.param("65-72B", {"L20": 8, "A100 40G": 8}, marks=pytest.mark.spec("S-DEP-022")),
    ],
)
def test_models_of_the_sources_sizes_fit_on_its_cards(size: str, cards: dict[str, int], model: Any) -> None:
    directory = model(size)
    for name, count in cards.items():
        settings = EngineSettings(tensor_parallel_size=count, max_model_len=4096, max_num_seqs=64)
        assert on_card(settings, directory, BY_NAME[name]).fits, name
    if size != "6-8B":
        assert not on_card(EngineSettings(max_model_len=4096), directory, BY_NAME["A10"]).fits


@pytest.mark.spec("S-DEP-024", "S-QNT-032")
def test_a_plan_has_sizes_cards_and_the_flags_that_make_the_model_fit(
    model: Any, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = model("12-14B")
    assert main(["plan", str(directory), "--max-num-seqs=32"]) == 0
    told = capsys.readouterr().out
    assert "14.77 B parameters, bfloat16, context 32768 tokens" in told
    assert re.search(r"weights +27\.5 GiB", told)
    assert "192.0 KiB a token (48 layers); 6.0 GiB for one sequence of 32768 tokens" in told
    assert re.search(r"A10 +22\.5 GiB +no +\d+\.\d GiB missing", told)
    assert re.search(r"L20 +45\.0 GiB +yes +\d+ / \d+", told)
    assert main(["plan", str(directory), "--gpu=a10", "--max-num-seqs=32"]) == 1
    told = capsys.readouterr().out
    assert "L20" not in told
    assert recommended(told) >= {"antiphon", "serve", str(directory), "--max-num-seqs=32", "--quantization=ifq"}
    assert "Without quantization it does not fit" in told
    assert main(["plan", str(directory), "--gpu=L20", "--max-num-seqs=32"]) == 0
    assert "--quantization=ifq halves the weights: use it if memory is tight or speed" in capsys.readouterr().out
    assert "adapters" not in told
    assert main(["plan", str(directory), "--gpu=L20", "--enable-lora", "--max-loras=64", "--max-lora-rank=32"]) == 1
    told = capsys.readouterr().out
    assert re.search(r"adapters +\d+\.\d GiB \(64 LoRA at once, 64 kept in main memory, rank 32\)", told)
    assert main(["plan", str(directory), "--memory-gb=8", "--max-num-seqs=32"]) == 1
    words = recommended(capsys.readouterr().out)
    assert words & {"--quantization=ifq", "--quantization=ifq_nf4"}
    assert words & {f"--tensor-parallel-size={count}" for count in (2, 4, 8)}


def test_a_plan_needs_no_triton(model: Any) -> None:
    program = "import sys; sys.modules['triton'] = None; from antiphon.cli import main; sys.exit(main(sys.argv[1:]))"
    words = "plan", str(model("6-8B")), "--gpu=L20", "--enable-lora"
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "Recommended for " in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_next", "idefics3", "glm4v"])
def test_the_vision_encoder_is_counted_on_its_device(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_vision_model(tmp_path, family)
    kept = load_encoder(directory, {}, "cpu")._family.module
    expected = sum(tensor.nbytes for tensor in kept.state_dict().values())
    text, card = ServeSettings(model=str(directory)), Card("card", 2048)
    on_main, on_gpu = replace(text, enable_mm=True), replace(text, enable_mm=True, vision_device="cuda", visions=2)
    found = sizing.images_of(on_main, directory)
    assert found is not None
    needs = found.each
    assert needs.weights == pytest.approx(expected, rel=0.01)
    assert sizing.images_of(text, directory) is None
    beside = [sizing.on_cpu(settings, directory).needs.beside_bytes for settings in (text, on_main, on_gpu)]
    assert beside == [0, needs.weights + needs.step + needs.kept, 2 * (needs.reading + needs.kept)]
    fits = [on_card(settings, directory, card) for settings in (text, on_main, on_gpu)]
    assert [fit.needs.beside_bytes for fit in fits[:2]] == [0, 0]
    assert 0 < fits[2].needs.beside_bytes - 2 * sizing.CONTEXT_BYTES < needs.step
    assert fits[0].cache_bytes == fits[1].cache_bytes > fits[2].cache_bytes
    assert main(["plan", str(directory), "--enable-mm"]) == 0
    told = capsys.readouterr().out
    assert re.search(
        r"images +\d+\.\d [KM]iB of main memory for the vision encoder and \d+\.\d MiB for its largest", told
    )
    assert "512.0 MiB of main memory at most for embeddings" in told
    assert main(["plan", str(directory), "--enable-mm", "--vision-device=cuda", "--gpu=L20"]) == 0
    assert "MiB of main memory to read an image" in capsys.readouterr().out
    assert main(["plan", str(directory), "--enable-mm", '--mm-processor-kwargs={"pixels": 7}']) == 2
    assert "the processor has no argument 'pixels'" in capsys.readouterr().err


def test_a_model_without_images_has_no_encoder_to_count(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(model("6-8B")), "--enable-mm"]) == 2
    assert "this model takes text only" in capsys.readouterr().err


def test_fields_of_the_config_count_in_a_plan_and_in_the_doctors_findings(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overrides, "_CACHE", str(tmp_path / "overrides"))
    directory, flag = model("12-14B"), '--hf-overrides={"num_hidden_layers": 12, "max_position_embeddings": 1024}'
    for command in (["plan", str(directory)], ["doctor", "--sizing", f"--model={directory}"]):
        assert main([*command, flag]) == 0
        assert "bfloat16, context 1024 tokens" in (told := capsys.readouterr().out)
        assert "(12 layers)" in told
    assert main(["doctor", "--hf-overrides=7"]) == 2
    assert "--hf-overrides: 7 is not a JSON object" in capsys.readouterr().err


@pytest.mark.spec("S-DEP-024")
def test_cards_of_this_machine_come_first_and_the_doctor_names_what_fits(
    model: Any, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smi(programs, TWO)
    program(programs, "docker", "exit 1")
    directory = model("6-8B")
    assert main(["plan", f"--model={directory}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cards = [line.split("  ")[0] for line in lines if "GiB   yes" in line or "GiB   no" in line]
    assert cards[:2] == ["CPU, here", "NVIDIA L20"]
    assert "L20" not in cards
    assert any(line.startswith("Recommended for NVIDIA L20") for line in lines)
    found = sizing.fit_check(EngineSettings(model=str(directory)))
    assert (found.state, found.subject) == ("ok", "model memory")
    assert found.finding.startswith("weights 14.2 GiB, 56.0 KiB a token of the KV cache; ")
    big = sizing.fit_check(EngineSettings(model=str(model("65-72B"))))
    assert (big.state, "does not fit here" in big.finding) == ("warn", True)
    assert "--tensor-parallel-size=" in big.advice
    assert main(["doctor", "--sizing", f"--model={directory}"]) == 0
    told = capsys.readouterr().out
    assert told.index("65-72B") < told.index("7.62 B parameters") < told.index("Recommended")


def test_cards_are_named_or_given_by_their_memory(programs: Path) -> None:
    assert chosen_card("A100-80GB", None) == BY_NAME["A100 80G"]
    assert chosen_card("", 24) == Card("24 GiB", 24 * 1024)
    assert chosen_card("mine", 24) == Card("mine", 24 * 1024)
    assert chosen_card("", None) is None
    assert chosen_card("GeForce RTX 4090", None) == chosen_card("4090", None) == BY_NAME["RTX 4090"]
    assert chosen_card("mi300x", None) == BY_NAME["MI300X"]
    for name in ("GTX 970", "A100"):  # there are two A100
        with pytest.raises(SettingsError, match=rf"--gpu: {name} is not one of A10, .*; give its memory with --mem"):
            chosen_card(name, None)
    with pytest.raises(SettingsError, match="--memory-gb: 0 is not above 0"):
        chosen_card("", 0)


def test_what_cannot_be_is_refused(model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = model("6-8B")
    for words, said in (
        ((str(directory), f"--model={directory}"), "the model is named twice"),
        ((str(directory), "--max-model-len=40000"), "this model allows 1 to 32768 tokens"),
        ((str(directory), "-tp=3"), "does not divide"),
        ((str(tmp_path / "none"),), "there is no directory"),
        ((str(directory), "--use-lookahead"), "--use-lookahead needs"),
    ):
        assert main(["plan", *words]) == 2
        assert said in capsys.readouterr().err


def test_a_cpu_gets_the_quantization_that_is_fast_there(
    tmp_path: Path, programs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of 16 bits do not fit into the memory, those of 8 or 4 bits do."""
    make_model(tmp_path, "llama", num_hidden_layers=8, hidden_size=512, intermediate_size=2048)
    settings = EngineSettings(
        model=str(tmp_path), max_num_seqs=2, max_model_len=256, max_num_batched_tokens=64, kv_cache_memory_gb=0.1
    )
    for mode in ("ifq_w8a8", "ifq_w4a8"):
        needs = sizing.predict(replace(settings, quantization=mode), tmp_path, "cpp")
        monkeypatch.setattr(sizing, "free_bytes", lambda needs=needs: needs.main_memory_bytes)
        words = ("--max-num-seqs=2", "--max-model-len=256", "--max-num-batched-tokens=64", "--kv-cache-memory-gb=0.1")
        assert main(["plan", str(tmp_path), *words]) == 0
        told = capsys.readouterr().out
        assert re.search(rf"Recommended for this machine's memory: .*--quantization={mode}", told)
        assert "Without quantization it does not fit" in told


def test_on_a_cpu_a_larger_cache_is_recommended_where_one_sequence_needs_it(
    tmp_path: Path, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(tmp_path, "llama", num_hidden_layers=4, max_position_embeddings=200_000)
    words = ("--max-num-seqs=2", "--kv-cache-memory-gb=0.1", "--max-num-batched-tokens=64")
    assert main(["plan", str(tmp_path), *words]) == 0
    told = capsys.readouterr().out
    assert re.search(r"CPU, here .* no +\d+\.\d MiB missing, \d+ of 4096 tokens fit", told)
    found = re.search(r"Recommended for this machine's memory: .* --kv-cache-memory-gb=([\d.]+)", told)
    assert found, told
    assert 0.1 < float(found[1]) < 1
    assert "--quantization=ifq_w8a8 halves the weights: use it if memory is tight or speed matters" in told
