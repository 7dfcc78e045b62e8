"""What the check with vLLM compares: the repacked layout, the verdict, and a process that answers as vLLM does."""

import sys
from pathlib import Path

import pytest
import torch

from antiphon.services.engine.quantization.formats.compressed_tensors import CompressedTensors
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.services.engine.quantizer.grid import INT4_MIDDLE, Rounded
from antiphon.services.engine.quantizer.layouts import stored
from bench.peer_systems import vllm_loads
from bench.peer_systems.vllm_loads import Comparison, VllmRefusedError, packed, reason, run_vllm

GREEDY = """import json, sys
request = json.load(open(sys.argv[2]))
if sys.argv[1] == "refused":
    sys.exit("ValueError: Failed to find a kernel.\\n CPUWNA16LinearKernel cannot implement due to: 8 bits")
outputs = [prompt[:1] * request["max_tokens"] for prompt in request["prompts"]]
json.dump({"version": "0", "outputs": outputs}, open(sys.argv[3], "w"))
"""


def test_the_repacked_layout_stands_for_the_same_weights() -> None:
    torch.manual_seed(0)
    values = torch.randint(0, 16, (32, 64), dtype=torch.uint8)
    zeros = torch.full((32, 2), INT4_MIDDLE, dtype=torch.uint8)
    matrix = Rounded(values, torch.rand(32, 2).to(torch.bfloat16), zeros)
    tensors = packed(stored("gptq", "m", matrix) | {"norm.weight": torch.ones(3)})
    assert set(tensors) == {"m.weight_packed", "m.weight_scale", "m.weight_shape", "norm.weight"}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    method = CompressedTensors.of_config({"format": "pack-quantized", "config_groups": groups})
    parts = {name.removeprefix("m."): tensor for name, tensor in tensors.items()}
    weight = method.weight(parts, (32, 64))
    assert isinstance(weight, QuantizedWeight)
    assert torch.equal(weight.dequantized(), matrix.plain())


def test_a_layout_passes_if_the_gap_is_small_or_a_cpu_has_no_kernel() -> None:
    assert Comparison("awq", 10, 9, 0.1).passed
    assert not Comparison("awq", 10, 2, 4.0).passed
    assert not Comparison("awq").passed
    assert not Comparison("awq", refusal="KeyError: weight").passed
    no_kernel = reason(
        "(Worker) ValueError: no kernel\n(Worker) CPUWNA16LinearKernel cannot implement due to: 8 bits\n"
    )
    assert no_kernel == "vLLM cannot run it on a CPU: CPUWNA16LinearKernel cannot implement due to: 8 bits"
    assert Comparison("weight_only_int8", refusal=no_kernel).passed
    assert not Comparison("awq", refusal=no_kernel).passed
    assert reason("x KeyError: weight\n") == "KeyError: weight"
    assert "9 of 10 tokens are the same, largest gap 0.100 | passed" in Comparison("awq", 10, 9, 0.1).line()


def test_a_process_generates_and_its_refusal_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "greedy.py"
    script.write_text(GREEDY, encoding="utf-8")
    monkeypatch.setattr(vllm_loads, "GREEDY", script)
    answer = run_vllm(Path(sys.executable), Path("model"), [[7, 8]], 3)
    assert (answer.version, answer.outputs) == ("0", [[7, 7, 7]])
    with pytest.raises(VllmRefusedError, match="vLLM cannot run it on a CPU: CPUWNA16LinearKernel"):
        run_vllm(Path(sys.executable), Path("refused"), [[7, 8]], 3)


def test_the_script_for_vllm_needs_nothing_of_this_project() -> None:
    lines = vllm_loads.GREEDY.read_text(encoding="utf-8").splitlines()
    modules = {line.split()[1].partition(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert modules
    assert modules <= sys.stdlib_module_names
