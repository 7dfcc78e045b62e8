"""The sdist and the wheels: what is in them, and which machines a wheel is for."""

import tarfile
from pathlib import Path

import pytest

from infra.dist.__main__ import ROOT, platform_tag, run


def test_the_tag_of_a_wheel_is_of_the_newest_glibc_that_a_library_needs(tmp_path: Path) -> None:
    old, new = tmp_path / "old.so", tmp_path / "new.so"
    old.write_bytes(b"\x7fELF\0GLIBC_2.2.5\0GLIBC_2.14\0")
    new.write_bytes(b"\x7fELF\0GLIBC_2.17\0GLIBC_2.34\0")
    assert platform_tag([old], "x86_64") == "manylinux_2_17_x86_64"
    assert platform_tag([old, new], "aarch64") == "manylinux_2_34_aarch64"


def test_a_library_that_needs_the_machine_s_runtime_goes_into_no_wheel(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"\x7fELF\0libstdc++.so.6\0")
    with pytest.raises(RuntimeError, match=r"library\.so"):
        platform_tag([library], "x86_64")


def test_the_sdist_has_the_folders_where_a_wheel_has_them(tmp_path: Path) -> None:
    run("hatchling", "build", "-d", str(tmp_path), "-t", "sdist", cwd=ROOT)
    [path] = tmp_path.iterdir()
    with tarfile.open(path) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"antiphon/services/gateway/app.py", "antiphon/shared/version.py", "pyproject.toml"} <= {*names}
    assert not [name for name in names if name.startswith(("services", "shared", "tests")) or name.endswith(".so")]
    assert len(names) == len({*names})
