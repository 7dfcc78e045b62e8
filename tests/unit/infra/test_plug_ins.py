"""Installed packages add APIs, guests and model families by entry points; what cannot be loaded is named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.services.gateway.apis.finding import find_apis
from antiphon.shared.actors.imports import plug_ins
from antiphon.shared.flags import SettingsError

FILES = {
    "choir/__init__.py": "",
    "choir/song/__init__.py": "",
    "choir/song/api.py": """
from antiphon.services.gateway.apis.openai.base import Api

class TheApi(Api):
    order = 7
""",
    "choir/family.py": """
from antiphon.services.engine.models.families.qwen2 import describe, layout

ARCHITECTURES = ("ChoirForCausalLM",)
""",
    "choir-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: choir\nVersion: 1.0\n",
    "choir-1.0.dist-info/entry_points.txt": """
[antiphon.apis]
song = choir.song

[antiphon.guests]
song = choir.song

[antiphon.model_families]
choir = choir.family

[antiphon.broken]
silent = choir.nothing
""",
}
CODE = """
from antiphon.services.engine.models.registry import find_family, supported_architectures
print(find_family({"architectures": ["ChoirForCausalLM"]}).__name__, "ChoirForCausalLM" in supported_architectures())
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_an_api_of_another_package_is_served_too(site: Path) -> None:
    from antiphon.services.gateway import apis

    assert [type(one).__module__ for one in find_apis(apis)][-1] == "choir.song.api"


def test_a_family_of_another_package_is_found_by_its_architecture(site: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{Path.cwd()}"}
    done = subprocess.run([sys.executable, "-c", CODE], env=environ, capture_output=True, text=True, check=False)
    assert done.stdout == "choir.family True\n", done.stderr


def test_a_plug_in_that_cannot_be_loaded_is_named_with_its_package(site: Path) -> None:
    with pytest.raises(SettingsError, match=r"plug-in silent of choir cannot be loaded: .*choir\.nothing"):
        plug_ins("broken")
    assert plug_ins("unknown") == []
