"""How many adapters an engine holds, and from where, by the flags about adapters."""

from pathlib import Path
from typing import Any

import pytest

from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.models.adapters import check_place, with_adapters

NAMED = tuple(f"name-{number}=/adapters/{number}" for number in range(12))


@pytest.mark.parametrize(
    ("flags", "limits"),
    [
        ({}, (None, None)),
        ({"enable_lora": True}, (8, 8)),
        ({"enable_lora": True, "max_loras": 3}, (3, 3)),
        ({"enable_lora": True, "max_cpu_loras": 2}, (2, 2)),
        ({"lora_modules": NAMED}, (12, 12)),
        ({"lora_modules": NAMED, "max_loras": 3}, (3, 12)),
        ({"lora_modules": NAMED, "max_loras": 3, "max_cpu_loras": 5}, (3, 5)),
    ],
)
def test_named_adapters_stay_in_memory_unless_the_limit_is_set(
    flags: dict[str, Any], limits: tuple[int | None, int | None]
) -> None:
    full = with_adapters(EngineSettings(**flags)).adapters
    assert (full.max_loras, full.max_cpu_loras) == limits


def test_requests_load_adapters_only_from_below_the_named_roots(tmp_path: Path) -> None:
    root, other = tmp_path / "adapters", tmp_path / "adapters-of-others"
    (root / "sql").mkdir(parents=True)
    other.mkdir()
    (root / "away").symlink_to(other)
    (root / "round").symlink_to(root / "round")
    (tmp_path / "in").symlink_to(root / "sql")
    roots = (str(tmp_path / "more"), str(root))
    for path in (
        root / "sql",
        root / "not-there",
        root / "sql" / ".." / "sql",
        tmp_path / "in",
        tmp_path / "more" / "x",
    ):
        check_place(str(path), "a", roots)
    told = set[str]()
    for path in (
        other,
        root / "away",
        root / ".." / "x",
        root / "round" / "x",
        Path("/etc"),
        Path("x\0"),
        Path("~nobody"),
    ):
        check_place(str(path), "a", ())
        with pytest.raises(ServiceError) as refused:
            check_place(str(path), "a", roots)
        told.add(refused.value.message)
    assert told == {"The adapter 'a' cannot be served: its directory is not below one of those of --lora-root."}
