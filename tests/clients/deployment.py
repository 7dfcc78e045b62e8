"""The server that the clients' checks call: three models, and two keys, of which one may send one request a minute."""

import json
import shutil
from pathlib import Path

from antiphon.shared.models.model_files import DEMO_DIRECTORY
from tests.clients.checks import EYE, MODEL, SLOW_KEY, THINKER
from tests.vision_models import make_vision_model

KEY = "none"
"""What clients send where they must send a key and their user has none."""
_BEGINS = "{{- '<|im_start|>assistant\\n' -}}"
_THINKS = (
    _BEGINS
    + "{%- if enable_thinking is not false -%}{{- '<think>\\n' -}}{%- else -%}{{- '<think></think>' -}}{%- endif -%}"
)


def flags(directory: Path) -> list[str]:
    """Makes the models' and the keys' files in a directory; returns the flags of `antiphon serve`."""
    thinker = Path(shutil.copytree(DEMO_DIRECTORY, directory / THINKER))
    told = json.loads((thinker / "tokenizer_config.json").read_text())
    before, _, after = told["chat_template"].rpartition(_BEGINS)
    told["chat_template"] = before + _THINKS + after
    (thinker / "tokenizer_config.json").write_text(json.dumps(told))
    eye = make_vision_model(directory / EYE, "qwen2_5_vl")
    models = [
        {"model": str(DEMO_DIRECTORY), "served-model-name": MODEL, "engines": 2},
        {"model": str(eye), "served-model-name": EYE, "enable-mm": True, "dtype": "float32"},
        {"model": str(thinker), "served-model-name": THINKER},
    ]
    keys = [{"name": "clients", "key": KEY}, {"name": "slow", "key": SLOW_KEY, "requests-per-minute": 1}]
    (directory / "models.json").write_text(json.dumps({"models": models}))
    (directory / "keys.json").touch(0o600)
    (directory / "keys.json").write_text(json.dumps({"keys": keys}))
    return [f"--models={directory / 'models.json'}", f"--api-keys-file={directory / 'keys.json'}"]
