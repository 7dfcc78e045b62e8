"""Checks the project's own source rules that linters do not offer: `house_limits.py [ROOT]`.

- A file (Python or C++) has at most 600 lines, besides those in `LONG` with their reason; a function at most 60, unless
  it contains a comment `# long: WHY`.
- A folder of the product, of `bench` or of `infra` has at most 14 modules, besides those in `WIDE` with their reason.
- A class of the product has at most 25 methods, properties among them.
- A dataclass or struct of the product with more than four fields is `kw_only`, unless the line of its name has a
  comment `# positional: WHY`.
- The product never unpickles data, evaluates text as code, or passes text to a shell.

The longest functions are always printed. The check parses the source and imports none of it.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60
FOLDER_MODULES_MAX = 14
CLASS_METHODS_MAX = 25
POSITIONAL_FIELDS_MAX = 4
SHOWN = 10
SIZED = ("services", "shared", "antiphon", "infra", "bench", "tests", "examples")
CPP = ("*.h", "*.cpp")
PRODUCT = ("services", "shared", "antiphon")
WIDE = {"services/engine/models/families": "one short module for each model family, all of the same form"}
LONG = {"shared/limits.py": "one table of constants, each with its reason"}
_STRUCTS = {"msgspec.Struct", "Message", "Part"}
_EXCUSE = re.compile(r"#\s*long:\s*\w+")
_UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
_ALLOWED = {("services/engine/worker/loading/checkpoint.py", "torch.load")}
"""Allowed calls by file: with `weights_only=True`, torch.load only builds tensors and refuses all other objects."""
_UNSAFE_CALLS = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "torch.load"}


@dataclass(frozen=True, order=True, slots=True)
class Function:
    """The length of a function in lines, and its place (file, line and name)."""

    lines: int
    place: str
    excused: bool


def main() -> int:
    """Runs the checks and prints the result. Returns 1 if there are problems, else 0."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    functions: list[Function] = []
    problems: list[str] = []
    for path in source_files(root, SIZED):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(root)
        tree = ast.parse(text, str(path))
        functions += measured(tree, text, str(name))
        problems += too_long(str(name), text)
        if name.parts[0] in PRODUCT:
            problems += [f"{name}:{line}: {what}" for line, what in unsafe(tree, name.as_posix())]
            problems += [f"{name}:{line}: {what}" for line, what in positional(tree, text)]
            problems += [f"{name}:{line}: {what}" for line, what in many_methods(tree)]
    for path in source_files(root, SIZED, CPP):
        problems += too_long(str(path.relative_to(root)), path.read_text(encoding="utf-8"))
    problems += [
        f"{f.place}: {f.lines} lines, more than {FUNCTION_LINES_MAX}, and no comment `# long: WHY`"
        for f in functions
        if f.lines > FUNCTION_LINES_MAX and not f.excused
    ]
    problems += too_wide(root)
    report(functions, problems)
    return 1 if problems else 0


def source_files(root: Path, folders: tuple[str, ...], patterns: tuple[str, ...] = ("*.py",)) -> Iterator[Path]:
    """Yields the files of the folders that match a pattern, sorted within each folder."""
    for folder in folders:
        yield from sorted(path for pattern in patterns for path in (root / folder).rglob(pattern))


def too_long(name: str, text: str) -> Iterator[str]:
    """Yields a problem if a file has too many lines."""
    if (count := text.count("\n")) > FILE_LINES_MAX and name not in LONG:
        yield f"{name}: {count} lines, more than {FILE_LINES_MAX}"


def too_wide(root: Path) -> Iterator[str]:
    """Yields a problem for each folder with too many modules, `__init__` included."""
    folders = Counter(path.parent for path in source_files(root, (*PRODUCT, "bench", "infra")))
    for folder, count in sorted(folders.items()):
        name = folder.relative_to(root).as_posix()
        if count > FOLDER_MODULES_MAX and name not in WIDE:
            yield f"{name}: {count} modules, more than {FOLDER_MODULES_MAX}"


def measured(tree: ast.AST, text: str, name: str) -> Iterator[Function]:
    """Yields every function of a file with its length."""
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            end = node.end_lineno or node.lineno
            excused = any(_EXCUSE.search(line) for line in lines[node.lineno - 1 : end])
            yield Function(end - node.lineno + 1, f"{name}:{node.lineno} {node.name}", excused)


def many_methods(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, problem) for every class with too many methods of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            count = sum(isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) for one in node.body)
            if count > CLASS_METHODS_MAX:
                yield node.lineno, f"{node.name} has {count} methods, more than {CLASS_METHODS_MAX}"


def positional(tree: ast.AST, text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, problem) for every dataclass or struct with many fields that can be built without their names."""
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and "# positional: " not in lines[node.lineno - 1]:
            decorators = [one for one in node.decorator_list if "dataclass" in ast.unparse(one)]
            if not decorators and _STRUCTS.isdisjoint(map(ast.unparse, node.bases)):
                continue
            options = [keyword for one in decorators if isinstance(one, ast.Call) for keyword in one.keywords]
            count = sum(isinstance(field, ast.AnnAssign) for field in node.body)
            if count > POSITIONAL_FIELDS_MAX and "kw_only" not in {one.arg for one in (*options, *node.keywords)}:
                yield node.lineno, f"{node.name} has {count} fields and is not kw_only"


def unsafe(tree: ast.AST, name: str = "") -> Iterator[tuple[int, str]]:
    """Yields (line, problem) for every import or call in the file `name` that could execute data as code."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for module in imported(node):
                if module.split(".")[0] in _UNSAFE_MODULES:
                    yield node.lineno, f"imports {module}"
        elif isinstance(node, ast.Call) and not allowed(node, name):
            yield from ((node.lineno, what) for what in unsafe_call(node))


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Returns the modules that a statement imports."""
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]


def allowed(call: ast.Call, name: str) -> bool:
    """Whether a call in the file `name` is one of the exceptions in `_ALLOWED` and has `weights_only=True`."""
    restricted = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in call.keywords)
    return restricted and (name, ast.unparse(call.func)) in _ALLOWED


def unsafe_call(call: ast.Call) -> Iterator[str]:
    """Yields the problems of a call: an unsafe function, or the argument `shell`."""
    name = ast.unparse(call.func)
    keywords = {k.arg: k.value for k in call.keywords}
    safe_loader = "Safe" in ast.unparse(keywords["Loader"]) if "Loader" in keywords else False
    if name in _UNSAFE_CALLS and not (name == "yaml.load" and safe_loader):
        yield f"calls {name}"
    shell = keywords.get("shell")
    if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
        yield f"calls {name} with shell="


def report(functions: list[Function], problems: list[str]) -> None:
    """Prints the longest functions, then the problems."""
    print("The longest functions:")
    for function in sorted(functions, reverse=True)[:SHOWN]:
        print(f"{function.lines:6} {function.place}")
    for problem in problems:
        print(f"error: {problem}")


if __name__ == "__main__":
    sys.exit(main())
