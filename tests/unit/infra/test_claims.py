"""The check of the claims in SECURITY.md: a row without a test, or with one that is not there, is an error."""

from pathlib import Path

import pytest

from infra.checks import claims

SOURCE = "async def test_async():\n    pass\n\ndef helper():\n    pass\n\nTestAll = make()\n"
ROW = "| a client | reads nothing | {} |\n"


def page(rows: str) -> str:
    return (
        f"# Security\n\n| no | claim |\n|---|---|\n\n{claims.HEADING}\n\n| who | what | tests |\n|---|---|---|\n{rows}"
    )


def told(tmp_path: Path, rows: str) -> list[str]:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_x.py").write_text(SOURCE)
    return list(claims.problems(claims.read_claims(page(rows)), tmp_path))


def test_a_claim_with_tests_that_exist_passes(tmp_path: Path) -> None:
    tests = "`tests/test_x.py::test_async`, `tests/test_x.py::TestAll`"
    assert told(tmp_path, ROW.format(tests) + "\n## Later\n\n| not | a claim |\n") == []


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("", "no test is named for: a client – reads nothing"),
        ("by reading", "no test is named"),
        ("`tests/test_x.py::test_gone`", "there is no tests/test_x.py::test_gone"),
        ("`tests/test_gone.py::test_async`", "there is no tests/test_gone.py::test_async"),
        ("`tests/test_x.py::helper`", "there is no tests/test_x.py::helper"),
    ],
)
def test_a_claim_without_a_test_that_exists_is_told(tmp_path: Path, tests: str, said: str) -> None:
    [problem] = told(tmp_path, ROW.format(tests))
    assert problem.startswith(said)


def test_a_page_without_the_table_is_told(tmp_path: Path) -> None:
    assert told(tmp_path, "") == [f"SECURITY.md has no table under {claims.HEADING!r}"]


def test_what_security_says_is_defended_has_its_tests() -> None:
    found = claims.read_claims((claims.ROOT / claims.PAGE).read_text(encoding="utf-8"))
    assert list(claims.problems(found, claims.ROOT)) == []
