"""How many adapters an engine holds, from the flags about adapters."""

from typing import Any

import pytest

from shared.config import EngineSettings
from shared.models.adapters import with_adapters

NAMED = tuple(f"name-{number}=/adapters/{number}" for number in range(12))


@pytest.mark.parametrize(
    ("flags", "limits"),
    [
        ({}, (None, None)),
        ({"enable_lora": True}, (8, 8)),
        ({"enable_lora": True, "max_loras": 3}, (3, 3)),
        ({"lora_modules": NAMED}, (12, 12)),
        ({"lora_modules": NAMED, "max_loras": 3}, (3, 12)),
        ({"lora_modules": NAMED, "max_loras": 3, "max_cpu_loras": 5}, (3, 5)),
    ],
)
def test_named_adapters_stay_in_memory_unless_the_limit_is_set(
    flags: dict[str, Any], limits: tuple[int | None, int | None]
) -> None:
    full = with_adapters(EngineSettings(**flags))
    assert (full.max_loras, full.max_cpu_loras) == limits
