"""The claim of which rows of the specification are proven: what counts, what does not, and what is told of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from infra.checks import spec_coverage

ROOT = Path(__file__).resolve().parents[3]
HEADER = "id\tname\tstate\treason\tparts\n"
ROWS = HEADER + "S-1\tone\nS-2\ttwo\t\t\tleft right\nS-3\tthree\twaived\tthe product knows better\nS-4\tfour\n"


class Project:
    """A project with a few rows and tests of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "docs" / "contributing").mkdir(parents=True)
        (root / "tests" / "container").mkdir(parents=True)
        (root / "tests" / "conftest.py").write_text('pytest_plugins = ("infra.checks.spec_plugin",)\n')
        (root / "pytest.ini").write_text(
            "[pytest]\nmarkers =\n  spec(*ids): rows\n  slow: minutes\ntestpaths = tests\nnorecursedirs = container\n"
        )
        self.rows(ROWS)

    def rows(self, text: str) -> None:
        (self.root / "docs" / "spec_rows.tsv").write_text(text)
        names = dict.fromkeys(line.partition("\t")[0] for line in text.splitlines()[1:])
        (self.root / "docs" / "spec_texts.tsv").write_text("id\ttext\n" + "".join(f"{one}\tIt is.\n" for one in names))

    def tests(self, text: str, path: str = "test_x.py") -> None:
        (self.root / "tests" / path).write_text("import pytest\n" + text)

    def run(self, *words: str, name: str = "spec-report") -> None:
        """Runs the tests and records them."""
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--spec-report=build/{name}.json"]
        subprocess.run([*argv, *words], cwd=self.root, env={"PYTHONPATH": str(ROOT)}, capture_output=True, check=False)

    def coverage(self, *words: str) -> int:
        return spec_coverage.main(["--root", str(self.root), *words])

    @property
    def report(self) -> dict[str, dict[str, object]]:
        return json.loads((self.root / "build" / "spec-report.json").read_text())["tests"]

    @property
    def states(self) -> dict[str, str]:
        """The page's third column, by row."""
        lines = (self.root / "docs" / "contributing" / "coverage.md").read_text().splitlines()
        cells = [line.split(" | ") for line in lines if line.startswith("| S-")]
        return {line[0].removeprefix("| "): line[2] for line in cells}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_row_is_proven_by_tests_that_passed_and_no_others(
    processes: str, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.rows(HEADER + "".join(f"S-{number}\trow\n" for number in range(1, 8)))
    project.tests("""
@pytest.mark.spec("S-1")
def test_passes(): pass
@pytest.mark.spec("S-2")
def test_is_skipped(): pytest.skip()
@pytest.mark.spec("S-3")
def test_fails(): assert False
@pytest.mark.spec("S-4")
@pytest.mark.xfail
def test_is_expected_to_fail(): assert False
@pytest.mark.spec("S-5", "S-6")
@pytest.mark.parametrize("value", [1, 2])
def test_passes_once(value): assert value == 1
@pytest.fixture
def broken():
    yield
    raise RuntimeError
@pytest.mark.spec("S-7")
def test_cannot_be_torn_down(broken): pass
""")
    project.run("-n", processes)
    assert project.coverage() == 0
    assert project.states == {"S-1": "proven"} | {f"S-{number}": "open" for number in range(2, 8)}
    assert "7 rows of the specification: 1 proven, 0 waived, 0 documented, 6 open" in capsys.readouterr().out
    outcomes = {name.partition("::")[2]: told["outcome"] for name, told in project.report.items()}
    assert outcomes == {
        "test_passes": "passed",
        "test_is_skipped": "skipped",
        "test_fails": "failed",
        "test_is_expected_to_fail": "xfailed",
        "test_passes_once[1]": "passed",
        "test_passes_once[2]": "failed",
        "test_cannot_be_torn_down": "failed",
    }


def test_a_test_that_was_left_out_proves_nothing(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.tests("""
@pytest.mark.spec("S-1")
def test_one(): pass
@pytest.mark.spec("S-1")
def test_two(): pass
""")
    project.run("-k", "one")
    assert project.coverage() == 0
    assert project.states["S-1"] == "open"
    project.run("tests/test_x.py::test_one")
    assert project.coverage("--claim") == 0
    assert project.states["S-1"] == "proven"
    capsys.readouterr()
    assert project.coverage("--proofs") == 1
    assert "S-1: tests/test_x.py::test_two not collected" in capsys.readouterr().out


def test_a_slow_test_has_the_outcome_of_its_own_last_run(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.tests("""
@pytest.mark.parametrize("value", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.spec("S-1")
def test_one(value): assert value != 3
@pytest.mark.slow
@pytest.mark.spec("S-1")
def test_two(): pass
""")
    project.run("-m", "not slow")
    assert project.coverage("--claim") == 0
    capsys.readouterr()
    assert project.coverage("--proofs") == 1
    told = capsys.readouterr().out
    assert "S-1: tests/test_x.py::test_two not collected" in told
    assert "test_one" not in told, "another case of it has passed"
    project.run("-m", "slow", name="slow")
    assert project.coverage("--keep-slow", str(project.root / "build/slow.json")) == 0
    kept = json.loads((project.root / spec_coverage.SLOW_REPORT).read_text())
    assert kept["all"] == {"passed": 2}
    assert list(kept["tests"]) == ["tests/test_x.py::test_one[2]", "tests/test_x.py::test_two"]
    assert project.coverage("--proofs") == 0


def test_several_processes_prove_together_and_one_that_is_killed_does_not(project: Project) -> None:
    killed = "import os, signal\n@pytest.mark.spec('S-4')\ndef test_b(): os.kill(os.getpid(), signal.SIGKILL)\n"
    for name in ("left", "right"):
        project.tests(f"@pytest.mark.spec('S-2:{name}')\ndef test_it(): pass\n", f"test_{name}.py")
    project.tests("@pytest.mark.spec('S-1')\ndef test_a(): pass\n" + killed, "test_killed.py")
    project.run("-n", "2", "--max-worker-restart=0")
    assert project.coverage() == 0
    outcomes = {name.removeprefix("tests/"): told["outcome"] for name, told in project.report.items()}
    assert outcomes["test_killed.py::test_b"] == "failed"
    assert project.states["S-4"] == "open"
    project.run("-n", "2", "-k", "not test_b")
    outcomes = {name.removeprefix("tests/"): told["outcome"] for name, told in project.report.items()}
    assert outcomes == {
        "test_killed.py::test_a": "passed",
        "test_killed.py::test_b": "deselected",
        "test_left.py::test_it": "passed",
        "test_right.py::test_it": "passed",
    }


def test_marks_of_modules_classes_and_parameters_count_for_the_tests_that_have_them(project: Project) -> None:
    project.tests("""
pytestmark = pytest.mark.spec("S-1")
@pytest.mark.spec("S-2:left")
class TestA:
    pytestmark = [pytest.mark.spec("S-2:right")]
    def test_a(self): pass
    class TestB:
        @pytest.mark.parametrize("value", [pytest.param(1, marks=pytest.mark.spec("S-4")), 2])
        def test_b(self, value): assert value == 1
""")
    project.run()
    assert {name: set(told["rows"]) for name, told in project.report.items()} == {  # pyright: ignore[reportArgumentType]
        "tests/test_x.py::TestA::test_a": {"S-1", "S-2:left", "S-2:right"},
        "tests/test_x.py::TestA::TestB::test_b[1]": {"S-1", "S-2:left", "S-2:right", "S-4"},
        "tests/test_x.py::TestA::TestB::test_b[2]": {"S-1", "S-2:left", "S-2:right"},
    }
    assert project.coverage() == 0
    assert project.states == {"S-1": "open", "S-2": "open", "S-3": "waived", "S-4": "proven"}


def test_a_row_is_proven_when_all_its_parts_are(project: Project) -> None:
    left = '@pytest.mark.spec("S-2:left")\ndef test_left(): pass\n'
    project.tests(left)
    project.run()
    assert project.coverage() == 0
    assert project.states["S-2"] == "open"
    project.tests(left + '@pytest.mark.spec("S-2:right")\ndef test_right(): pass\n')
    project.run()
    assert project.coverage() == 0
    assert project.states["S-2"] == "proven"
    assert (
        "left: `tests/test_x.py::test_left`<br>right: "
        in (project.root / "docs" / "contributing" / "coverage.md").read_text()
    )


def test_a_waived_row_does_not_count_and_says_why(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.tests('@pytest.mark.spec("S-3")\ndef test_three(): pass\n')
    project.run()
    assert project.coverage() == 0
    assert "4 rows of the specification: 0 proven, 1 waived, 0 documented, 3 open" in capsys.readouterr().out
    line = "| S-3 | three | waived | `tests/test_x.py::test_three` | the product knows better |"
    assert line in (project.root / "docs" / "contributing" / "coverage.md").read_text()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("S-1\tone\twaived", "S-1 is waived without a reason"),
        ("S-1\tone\tdocumented\tdocs/facts.md", "docs/facts.md does not name it"),
        ("S-1\tone\tdocumented\tdocs/none.md", "docs/none.md does not name it"),
        ("S-1\tone\tlater\treason", "'later' is not one of"),
        ("S-2\ttwo\nS-2\ttwo", "S-2 stands there twice"),
        ("S-2\ttwo\t\tB's third field is refused", "the remark of S-2 says 'refused'"),
        (
            "S-2\ttwo\t\tIt does not answer 400",
            "the remark of S-2 says 'not'. If the product departs from the row, its state",
        ),
    ],
)
def test_a_row_that_breaks_a_rule_is_named(
    project: Project, row: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (project.root / "docs" / "facts.md").write_text("S-10 is a fact.")
    project.rows(HEADER + row + "\n")
    assert project.coverage("--claim") == 1
    assert said in capsys.readouterr().out


def test_a_fact_is_documented_where_the_document_names_it(project: Project) -> None:
    (project.root / "docs" / "facts.md").write_text("S-1: it is so.")
    project.rows(HEADER + "S-1\tone\tdocumented\tdocs/facts.md\n")
    assert project.coverage("--claim") == 0
    assert project.states == {"S-1": "documented"}


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ('@pytest.mark.spec("S-9")\ndef test_x(): pass', "test_x names S-9, which the specification does not have"),
        ('@pytest.mark.spec("S-2")\ndef test_x(): pass', "S-2 has the parts S-2:left, S-2:right"),
        ('@pytest.mark.spec("S-2:up")\ndef test_x(): pass', "S-2 has the parts S-2:left, S-2:right"),
        ('@pytest.mark.spec("S-1:up")\ndef test_x(): pass', "S-1 has no parts in docs/spec_rows.tsv"),
        ('CASES = [pytest.param(1, marks=pytest.mark.spec("S-1"))]', "test_x.py:2: put the spec mark among"),
        ('@pytest.mark.spec("S-" + "1")\ndef test_x(): pass', "test_x.py:2: a spec mark names its rows as plain"),
    ],
)
def test_a_mark_that_means_nothing_is_named(
    project: Project, test: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    project.tests(test + "\n")
    assert project.coverage("--check") == 1
    assert said in capsys.readouterr().out


def test_without_a_report_nothing_is_claimed(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert project.coverage() == project.coverage("--proofs") == 1
    assert "run `make test` first" in capsys.readouterr().out
    assert not (project.root / "docs" / "contributing" / "coverage.md").exists()


def test_a_report_of_other_sources_is_not_believed(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.tests('@pytest.mark.spec("S-1")\ndef test_x(): pass\n')
    project.run()
    project.tests('@pytest.mark.spec("S-4")\ndef test_x(): pass\n')
    assert project.coverage() == 1
    assert "says that tests/test_x.py::test_x names S-1, the source does not" in capsys.readouterr().out


def test_a_page_that_is_out_of_date_is_found_without_a_report(project: Project) -> None:
    one = '@pytest.mark.spec("S-1")\ndef test_x(): pass\n'
    project.tests(one)
    assert project.coverage("--check") == 1
    assert project.coverage("--claim") == project.coverage("--check") == 0
    changes = {
        "another mark": lambda: project.tests(one.replace("S-1", "S-4")),
        "another test": lambda: project.tests(one + one.replace("_x", "_y")),
        "another state": lambda: project.rows(ROWS.replace("S-1\tone", "S-1\tone\twaived\treason")),
        "another reason": lambda: project.rows(ROWS.replace("knows better", "knows best")),
        "a row more": lambda: project.rows(ROWS + "S-5\tfive\n"),
    }
    for name, change in changes.items():
        change()
        assert project.coverage("--check") == 1, name
        project.tests(one)
        project.rows(ROWS)
        assert project.coverage("--check") == 0, name


def test_a_row_is_not_called_proven_by_hand(project: Project) -> None:
    assert project.coverage("--claim") == 0
    page = project.root / "docs" / "contributing" / "coverage.md"
    page.write_text(page.read_text().replace("| S-1 | one | open |", "| S-1 | one | proven |"))
    assert project.coverage("--check") == 1


def test_what_containers_prove_is_named_and_judged_where_they_ran(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.tests('@pytest.mark.spec("S-4")\ndef test_x(): pass\n')
    project.tests('@pytest.mark.spec("S-1", "S-4")\ndef test_c(): assert False\n', "container/test_c.py")
    project.run()
    assert project.coverage() == 0
    assert (project.states["S-1"], project.states["S-4"]) == ("open", "proven")
    assert project.coverage("--claim") == 0
    assert (project.states["S-1"], project.states["S-4"]) == ("proven (container test)", "proven")
    capsys.readouterr()
    assert project.coverage("--proofs") == 1
    assert (
        "only container tests prove S-1, and they have no report: run `make container-test`" in capsys.readouterr().out
    )
    assert project.coverage("--proofs", "--without-container") == 0
    assert "not judged, as container tests did not run: S-1\n" in capsys.readouterr().out
    project.run("tests/container", name="spec-report-container")
    for words in ((), ("--without-container",)):
        assert project.coverage("--proofs", *words) == 1
        said = capsys.readouterr().out
        assert "S-1: tests/container/test_c.py::test_c failed" in said
        assert "S-4: tests/container/test_c.py::test_c failed" in said


def test_the_page_says_whether_it_is_a_claim_or_of_which_commit_is_the_run(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    def git(*words: str) -> str:
        argv = ["git", "-C", str(project.root), "-c", "user.name=a", "-c", "user.email=a@example.com", *words]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()

    def page() -> str:
        assert project.coverage("--check") == 0
        return (project.root / "docs" / "contributing" / "coverage.md").read_text()

    project.tests('@pytest.mark.spec("S-1")\ndef test_x(): pass\n')
    project.run()
    assert project.coverage() == project.coverage("--proofs") == 0
    assert "Made from a run of the tests of commit unknown." in page()
    (project.root / ".gitignore").write_text("build/\n__pycache__/\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    project.run()
    assert project.coverage() == project.coverage("--proofs") == 0
    assert f"Made from a run of the tests of commit {git('rev-parse', 'HEAD')}." in page()
    assert project.coverage("--claim") == project.coverage("--proofs") == 0
    assert "claimed, and is not the result of a run" in page()
    assert "Made from a run" not in page()
    project.run()
    assert project.coverage() == 0
    assert f"Made from a run of the tests of commit {git('rev-parse', 'HEAD')}-changed." in page()
    git("commit", "-qam", "two")
    capsys.readouterr()
    assert project.coverage("--proofs") == 1
    assert "run the tests again" in capsys.readouterr().out


def test_each_row_has_the_text_of_what_it_asks_for(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    texts = project.root / "docs" / "spec_texts.tsv"
    whole = texts.read_text()
    for wrong in (whole.replace("S-2\tIt is.\n", ""), whole.replace("S-2\tIt is.", "S-2\t"), whole + "S-9\tIt is.\n"):
        texts.write_text(wrong)
        assert project.coverage("--claim") == 1
        assert "does not have a text for each row" in capsys.readouterr().out
    texts.unlink()
    assert project.coverage("--claim") == 1
