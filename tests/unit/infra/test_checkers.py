"""The tools that check the code see all of it."""

import tomllib

from tests.system.served import ROOT


def test_the_type_checker_is_told_the_links_in_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    links = {f"antiphon/{path.name}" for path in (ROOT / "antiphon").iterdir() if path.is_symlink()}
    assert links == {"antiphon/services", "antiphon/shared"}
    # It does not follow links below a folder that it is told.
    assert {"antiphon", *links} <= {*settings["include"]}
    assert {path.partition("/")[0] for path in settings["strict"]} == {"antiphon"}
