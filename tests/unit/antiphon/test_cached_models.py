"""`antiphon pull`, `list` and `rm`, with a hub on this machine."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from antiphon.cli import main
from antiphon.operate import cached_models as command
from antiphon.shared.config import EngineSettings
from antiphon.shared.models.cached import cached_models
from antiphon.shared.models.gguf_model import directory as product
from antiphon.shared.models.model_files import model_directory
from tests.unit.shared.hub_server import COMMITS, NAME, Hub, write_cache
from tests.unit.shared.test_gguf_directory import write
from tests.unit.shared.test_hub import SMALL, WEIGHTS, home, online

__all__ = ["home", "online"]
MAIN = COMMITS["main"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(product, "_CACHE", str(tmp_path / "made"))
    return tmp_path / "made"


@pytest.fixture
def file(tmp_path: Path) -> bytes:
    return write(tmp_path / "made.gguf").read_bytes()


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(words) == code
    told = capsys.readouterr()
    return told.out if code == 0 else told.out + told.err


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return json.loads(run(capsys, "list", "--json"))


def test_what_is_pulled_is_listed_and_can_be_removed(
    online: Hub, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert listed(capsys) == []
    assert run(capsys, "list").startswith("There are no models in the caches.")
    directory = Path(run(capsys, "pull", NAME).strip())
    assert directory == model_directory(EngineSettings(model=NAME))
    assert (directory / "model.safetensors").is_file()
    [model] = listed(capsys)
    assert (model["name"], model["source"], model["size_bytes"]) == (NAME, "hub", 2 + 2 - 2 + len(b"weights"))
    assert model["last_used"].startswith("20")
    assert f"Removed {NAME} (9 bytes): 9 bytes are free again." in run(capsys, "rm", NAME, "--yes")
    assert listed(capsys) == []
    assert not directory.exists()


def test_a_gguf_file_is_listed_with_its_tag_and_removed_alone(
    online: Hub, home: Path, file: bytes, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = file + b"\0" * 64
    online.files[MAIN] = {"config.json": b"{}", "m-Q4_K_M.gguf": file, "sub/m-Q8_0.gguf": other}
    first = Path(run(capsys, "pull", NAME).strip())
    assert (first.name, first.read_bytes()) == ("m-Q4_K_M.gguf", file)
    second = Path(run(capsys, "pull", f"{NAME}:q8_0").strip())
    assert second == first.parent / "sub" / "m-Q8_0.gguf"
    sizes = {model["name"]: (model["size_bytes"], model["quantization"]) for model in listed(capsys)}
    assert sizes == {f"{NAME}:Q4_K_M": (len(file), "Q4_K_M"), f"{NAME}:Q8_0": (len(other), "Q8_0")}
    made = model_directory(EngineSettings(model=f"{NAME}:Q8_0"))
    converted = sum(path.lstat().st_size for path in made.iterdir())
    os.utime(made, (2e9, 2e9))
    used = {model["name"]: model["last_used"] for model in listed(capsys)}
    assert used[f"{NAME}:Q8_0"] == "2033-05-18T03:33:20Z"
    told = run(capsys, "rm", f"{NAME}:q8_0", "--yes")
    assert f"{command.in_words(len(other) + converted)} are free again" in told
    assert not made.exists()
    assert first.is_file()
    assert not second.exists()
    assert sum(path.stat().st_size for path in (home / "hub").rglob("blobs/*")) == len(file) + 2
    run(capsys, "rm", NAME, "--yes")
    assert not first.exists()
    assert listed(capsys) == []


def test_a_blob_that_another_revision_needs_stays(home: Path, file: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    write_cache(home, {"a-Q4_0.gguf": file, "b-Q8_0.gguf": file})
    assert run(capsys, "rm", f"{NAME}:Q4_0", "--yes").endswith("0 bytes are free again.\n")
    assert (home / "hub" / "models--choir--alto" / "snapshots" / MAIN / "b-Q8_0.gguf").read_bytes() == file


def test_other_weights_and_their_quantization_have_a_line_of_their_own(
    home: Path, file: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.dumps({"quantization_config": {"quant_method": "awq"}}).encode()
    write_cache(home, {**SMALL, **WEIGHTS, "config.json": config, "m-Q4_0.gguf": file})
    assert {model["name"]: model["quantization"] for model in listed(capsys)} == {NAME: "awq", f"{NAME}:Q4_0": "Q4_0"}
    heading, *rows = run(capsys, "list").splitlines()
    assert heading.split() == ["NAME", "SIZE", "LAST", "USED", "QUANTIZATION"]
    assert [row.split()[0] for row in rows] == [NAME, f"{NAME}:Q4_0"]
    write_cache(home, {"config.json": b'{"torch_dtype": "bfloat16"}'}, "v1")
    assert "BF16" in {model.quantization for model in cached_models()}


def test_of_a_file_elsewhere_only_what_was_made_is_removed(
    home: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "mine-Q8_0.gguf")
    made = model_directory(EngineSettings(model=str(path)))
    [model] = listed(capsys)
    assert (model["name"], model["source"], model["quantization"]) == (str(path), "file", "Q8_0")
    assert model["size_bytes"] == path.stat().st_size
    assert f"Only what was made of {path} is gone; the file itself stays." in run(capsys, "rm", str(path), "--yes")
    assert path.is_file()
    assert not made.exists()


def test_rm_asks(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_cache(home, {**SMALL, **WEIGHTS})
    assert "this is no terminal: add --yes" in run(capsys, "rm", NAME, code=2)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    for answer, code, left in (("n", 1, 1), ("", 1, 1), ("y", 0, 0)):
        monkeypatch.setattr("builtins.input", lambda answer=answer: answer)
        run(capsys, "rm", NAME, code=code)
        assert len(listed(capsys)) == left


def test_mistakes_are_told(online: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{NAME} is not in the caches; `antiphon list` shows what is" in run(capsys, "rm", NAME, "--yes", code=4)
    assert "is no name on the hub" in run(capsys, "pull", "/data/model", code=2)
    assert "has no GGUF file" in run(capsys, "pull", f"{NAME}:Q4_0", code=4)
    assert "has no model of this name" in run(capsys, "pull", "choir/none", code=4)


def test_another_cache_can_be_named(online: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--download-dir", str(tmp_path / "elsewhere"))
    run(capsys, "pull", NAME, *where)
    assert listed(capsys) == []
    assert NAME in run(capsys, "list", *where)
    run(capsys, "rm", NAME, "--yes", *where)
    assert NAME not in run(capsys, "list", *where)


@pytest.mark.parametrize(("count", "text"), [(5, "5 bytes"), (2048, "2.0 KiB"), (3 * 2**30 // 2, "1.5 GiB")])
def test_sizes_are_readable(count: int, text: str) -> None:
    assert command.in_words(count) == text
