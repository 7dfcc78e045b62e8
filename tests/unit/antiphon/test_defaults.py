"""The defaults of the four ways to start everything, compared with the golden table `tests/golden/defaults.tsv`.

The table's first column names rows of the specification and is written by hand; `pytest --update-golden` rewrites the
others from what the parsers give. `run` is shown on a machine with a GPU; on a CPU its `dtype` is auto.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from antiphon.cli import main
from antiphon.entrypoints.openai import api_server
from antiphon.launch import devices, launcher
from antiphon.settings import NOT_FOR_USERS, SERVICES, RunSettings, ServeSettings
from antiphon.shared.flags import flags_of, values_of
from antiphon.shared.settings.other_options import VARIABLES

ROOT = Path(launcher.__file__).parents[2]
TABLE = ROOT / "tests" / "golden" / "defaults.tsv"
HEADINGS = ["rows", "flag", "variable", "serve", "api_server", "run", "run --backend=deepspeed"]
DEEPSPEED = "--backend=deepspeed"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServeSettings]:
    """What each way to start would serve with, on a machine with one GPU and without variables."""
    found: list[ServeSettings] = []

    def serve(settings: ServeSettings, _environ: object) -> int:
        found.append(settings)
        return 0

    fields = [item for kind in (*SERVICES.values(), RunSettings) for item in flags_of(kind)]
    for name in (*(item.metadata["env"] for item in fields), *(variable.name for variable in VARIABLES)):
        monkeypatch.delenv(name or "UNNAMED", raising=False)
    monkeypatch.setenv(devices.VARIABLE, "0")
    monkeypatch.setattr(launcher, "serve", serve)
    for code in (main(["serve"]), api_server.main(["--model=needed"]), main(["run"]), main(["run", DEEPSPEED])):
        assert code == 0
    found[1] = dataclasses.replace(found[1], model="")  # it has no default there: the model has to be named
    return found


def word(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value) or "-"


def render(started: Sequence[ServeSettings], rows: dict[str, str]) -> str:
    lines, found = ["\t".join(HEADINGS)], [*map(values_of, started)]
    for item in flags_of(RunSettings):
        if item.name not in NOT_FOR_USERS:
            flag = f"--{item.name.replace('_', '-')}"
            values = [word(each[item.name]) if item.name in each else "" for each in found]
            lines.append("\t".join([rows.get(flag, "-"), flag, item.metadata["env"] or "-", *values]))
    return "\n".join(lines) + "\n"


@pytest.mark.spec(
    "S-SRV-010", "S-SRV-022", "S-SRV-036", "S-SRV-041", "S-SRV-053", "S-SRV-054", "S-SRV-055", "S-SRV-061"
)  # fmt: skip
def test_every_default_is_the_one_of_the_golden_table(started: list[ServeSettings], update_golden: bool) -> None:
    known = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    rows = {flag: row for row, flag, *_ in (line.split("\t") for line in known.splitlines())}
    found = render(started, rows)
    if update_golden:
        TABLE.write_text(found, encoding="utf-8")
    assert update_golden or known == found, "if the change is meant, run pytest with --update-golden"


def test_the_golden_table_names_rows_that_there_are() -> None:
    names = {line.split("\t")[0] for line in (ROOT / "docs" / "spec_rows.tsv").read_text(encoding="utf-8").splitlines()}
    told = [line.split("\t")[0] for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]]
    assert {row for rows in told for row in rows.split(" ") if row != "-"} <= names
