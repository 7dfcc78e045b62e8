"""The test files that a change can affect, one a line: `python -m infra.checks.affected [REVISION]`; `make quick`.

The change is what differs from the revision, committed or not; by default from where this branch left main, and on
main from the commit before. A test file is affected if one of the files that it needs has changed: itself, the
conftest.py of its folders, and what these import or start as `python -m MODULE`, directly or through others. A file
that is not Python belongs to the modules that name it or its kind (`*.md`), and to those of the nearest folder that has
some. This is read from the source; nothing is imported. What a test finds in another way is not seen.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

FOLDERS = ("services", "shared", "antiphon", "tests", "infra", "bench", "examples")
FOR_ALL = {"pyproject.toml", "constraints.txt"}
OF_EVERY_TEST = ("tests/support/warm.py", "tests/support/kernels_on_gpu.py", "infra/checks/spec_plugin.py")
"""Loaded for every test, whatever it tests; what these import is not followed."""
NOT_RUN = ("tests/attack", "tests/cluster", "tests/clients", "tests/container", "tests/emulated")
"""Folders whose tests `make quick` leaves to their own commands."""


def main() -> int:
    """Prints the files. Returns 0."""
    changed = set(_git("diff", "--name-only", _base()) + _git("ls-files", "--others", "--exclude-standard"))
    sources = {
        path: Path(path).read_text()
        for path in _git("ls-files", "--cached", "--others", "--exclude-standard")
        if path.endswith(".py") and path.startswith(FOLDERS) and Path(path).exists()
    }
    print("\n".join(affected(sources, changed)))
    return 0


def affected(sources: Mapping[str, str], changed: set[str]) -> list[str]:
    """Returns the test files. `sources`: the text of each Python file by its path, as `changed` has paths."""
    tests = [path for path in sources if Path(path).name.startswith("test_") and not path.startswith(NOT_RUN)]
    if changed & FOR_ALL:
        return sorted(tests)
    users: dict[str, set[str]] = defaultdict(set)
    by_name = {_module(path): path for path in sources}
    for path, text in sources.items():
        if path in OF_EVERY_TEST:
            continue
        for name in needs(path, text, by_name):
            users[name].add(_module(path))
    reached = {_module(path) for path in changed if path.endswith(".py")}
    for path in (path for path in changed if not path.endswith(".py")):
        reached |= {_module(user) for user in _users_of_file(path, sources)}
    waiting = list(reached)
    while waiting:
        new = users[waiting.pop()] - reached
        reached |= new
        waiting += new
    return sorted(path for path in tests if _module(path) in reached)


def needs(path: str, text: str, by_name: Mapping[str, str]) -> Iterator[str]:
    """Yields the names of modules that a file imports or starts; some of them do not exist."""
    tree, names = ast.parse(text), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.List | ast.Tuple | ast.Call):
            names |= {name for word in _words(node) for name in _started(word, by_name)}
    if "pkgutil" in names:
        # Imports the modules that it finds in its package.
        folder = path.rpartition("/")[0]
        names |= {name for name, other in by_name.items() if other.startswith(f"{folder}/")}
    for name in names:
        parts = name.split(".")
        yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    if path.startswith("tests/"):
        yield from (_module(f"{folder}/conftest.py") for folder in Path(path).parents if f"{folder}" != ".")


def _words(node: ast.List | ast.Tuple | ast.Call) -> list[str]:
    """The literals of what may be a command line, or an import by name."""
    parts = node.args if isinstance(node, ast.Call) else node.elts
    heads = [part.values[0] if isinstance(part, ast.JoinedStr) and part.values else part for part in parts]
    words = [head.value for head in heads if isinstance(head, ast.Constant) and isinstance(head.value, str)]
    imports = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("run_module", "import_module"))
    return words if not isinstance(node, ast.Call) or imports or "-m" in words else []


def _started(word: str, by_name: Mapping[str, str]) -> set[str]:
    """The modules of a word: a module, the beginning of modules (`f"antiphon.services.{name}"`), or the command."""
    if word.endswith(".") and word.startswith(FOLDERS):
        return {name for name in by_name if name.startswith(word) and name.endswith(".__main__")}
    return {word, f"{word}.__main__"} & by_name.keys()


def _users_of_file(path: str, sources: Mapping[str, str]) -> Iterable[str]:
    """The modules of the nearest folder that has some, and those that name the file."""
    for folder in Path(path).parents[:-2]:
        if beside := [other for other in sources if Path(other).parent == folder]:
            yield from beside
            break
    name, kind = Path(path).name, f'*{Path(path).suffix}"'
    naming = (path for path, text in sources.items() if name in text or (kind in text and path.startswith("tests/")))
    yield from (path for path in naming if path not in OF_EVERY_TEST)


def _module(path: str) -> str:
    """The name by which a file is imported: `services` and `shared` are parts of `antiphon`, by links."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"antiphon.{name}" if path.startswith(("services/", "shared/")) else name


def _base() -> str:
    if len(sys.argv) > 1:
        return sys.argv[1]
    [head], has_main = _git("rev-parse", "HEAD"), _git("branch", "--list", "main")
    base = _git("merge-base", "HEAD", "main")[0] if has_main else head
    return f"{head}~" if base == head else base


def _git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main())
