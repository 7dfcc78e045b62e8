"""Weights of 8 and 4 bits beside llama.cpp: the files are made once, and ratios are taken within rounds."""

from pathlib import Path

import pytest

from bench.harness.sample import Sample
from bench.limits_of_machine.cpu_accounting import Cpu
from bench.peer_systems import quantized
from bench.peer_systems.peer_servers import openvino_model

QUANTIZE = """#!/bin/sh
test "$3" = Q4_0 || { echo "no such type" >&2; exit 3; }
cat "$1" > "$2"
"""


def sample(round: int, server: str, wall_s: float) -> Sample:
    cpu = Cpu(client=0.1, parts={server: 1.5}, foreign=0.0)
    return Sample(round, "c1", server, 7, wall_s, 1.0, 1.2, 0.6, 100, 60, cpu, ttft_ms_p50=10.0 * wall_s)


def test_rates_are_beside_those_of_bfloat16_and_of_the_rival() -> None:
    names = ("antiphon", "antiphon int8", "llama.cpp Q8_0")
    walls = ((2.0, 1.0, 4.0), (20.0, 10.0, 30.0), (4.0, 2.0, 6.0))
    samples = [
        sample(round, name, wall) for round, row in enumerate(walls) for name, wall in zip(names, row, strict=True)
    ]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in quantized.table(samples).splitlines()[2:]]
    assert rows == [
        ["c1", "antiphon", "15.0", "40", "1.00", "–", "–"],
        ["c1", "antiphon int8", "30.0", "20", "2.00", "3.00", "–"],
        ["c1", "llama.cpp Q8_0", "10.0", "60", "0.67", "–", "–"],
    ]


def test_a_quantized_file_is_made_once(tmp_path: Path) -> None:
    server, gguf = tmp_path / "llama-server", tmp_path / "m-bf16.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(SystemExit, match="build it together with llama-server"):
        quantized.quantized_file(server, tmp_path, gguf, "Q4_0")
    tool = tmp_path / "llama-quantize"
    tool.write_text(QUANTIZE, encoding="utf-8")
    tool.chmod(0o755)
    made = quantized.quantized_file(server, tmp_path, gguf, "Q4_0")
    assert (made.name, made.read_bytes()) == ("m-Q4_0.gguf", b"GGUF")
    tool.unlink()
    assert quantized.quantized_file(server, tmp_path, gguf, "Q4_0") == made


def test_a_failure_of_the_tool_is_told(tmp_path: Path) -> None:
    gguf, tool = tmp_path / "m-bf16.gguf", tmp_path / "llama-quantize"
    gguf.write_bytes(b"GGUF")
    tool.write_text(QUANTIZE, encoding="utf-8")
    tool.chmod(0o755)
    with pytest.raises(SystemExit, match="code 3: no such type"):
        quantized.quantized_file(tmp_path / "llama-server", tmp_path, gguf, "Q8_0")
    assert not (tmp_path / "m-Q8_0.gguf").exists()


EXPORT = """#!/bin/sh
for target; do :; done
case "$*" in *"--weight-format int8"*) mkdir "$target";; *) mkdir "$target"; echo "no such format" >&2; exit 2;; esac
"""


def test_openvinos_model_is_made_once_by_the_tool_beside_its_python(tmp_path: Path) -> None:
    tool, model = tmp_path / "bin" / "optimum-cli", tmp_path / "m"
    tool.parent.mkdir()
    tool.write_text(EXPORT, encoding="utf-8")
    tool.chmod(0o755)
    made = openvino_model(tool.with_name("python"), model, "int8")
    assert made == tmp_path / "m-openvino-int8"
    with pytest.raises(SystemExit, match="code 2: no such format"):
        openvino_model(tool.with_name("python"), model, "int4")
    assert not (tmp_path / "m-openvino-int4").exists()
    tool.unlink()
    assert openvino_model(tool.with_name("python"), model, "int8") == made
