"""Checks the value of `--hf-overrides`. `shared.models.overrides` applies it."""

import json
from typing import Any, cast

from shared.flags import Rule


def overrides_of(text: str) -> dict[str, Any] | None:
    """Returns the JSON object in the value of `--hf-overrides`, {} for no text or `none`, None for anything else."""
    try:
        value: Any = {} if text in ("", "none") else json.loads(text)
    except ValueError:
        return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


HF_OVERRIDES = Rule(
    'a JSON object with fields of config.json, such as {"rope_theta": 1000000}',
    lambda text: overrides_of(text) is not None,
)
