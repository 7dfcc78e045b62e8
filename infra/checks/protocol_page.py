"""Writes the reference part of docs/contributing/protocol.md: subjects, messages, errors and limits in the code.

The part of the page before `MARKER` is written by hand and kept. Subjects and message types are imported. The subjects
on which a service listens, and the replies of its handlers, are read from the source; the services are not imported.

Run as `python -m infra.checks.protocol_page` to write the page, with `--check` to end with 1 if it is out of date.
"""

import argparse
import ast
import inspect
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

import antiphon.shared.messages
from antiphon.shared import errors, limits
from antiphon.shared.files import limits as file_limits
from antiphon.shared.messages import Message
from antiphon.shared.messages.base import Part
from antiphon.shared.subjects import Subjects
from infra.checks.generated import keep

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "contributing" / "protocol.md"
MARKER = "<!-- Everything below is written by `make docs` from the code; do not edit it. -->"
SERVICES = ("gateway", "tokenizer", "engine", "detokenizer", "vision")
_UNITS = {"_S": "s", "_MS": "ms", "_CHARS_MAX": "characters", "_TOKENS_MAX": "tokens"}
_SECTION = "# --- "
_BINDS = (".bind", ".bind_handled")


@dataclass(frozen=True, slots=True)
class Listener:
    """A service that receives messages on the subjects of one method of `Subjects`."""

    service: str
    subject_method: str
    messages: tuple[str, ...]
    is_queue: bool


@dataclass(frozen=True, slots=True)
class Handler:
    """A service that handles a message. `reply` is the type of the answer, empty if there is no answer."""

    service: str
    message: str
    reply: str


def main(argv: Sequence[str] | None = None) -> int:
    """Writes or checks the page. Returns 1 if `--check` finds that the page is out of date, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 when the page is out of date")
    return keep(PAGE, render(), "make docs", check=parser.parse_args(argv).check)


def render() -> str:
    """Returns the text of the page: the existing part before the marker, and the reference made from the code."""
    narrative = PAGE.read_text(encoding="utf-8").partition(MARKER)[0].rstrip()
    modules = [module for service in SERVICES for module in parse_service(ROOT / "services" / service)]
    parts = [narrative, MARKER, *subjects_section(modules), *messages_section(modules), *errors_section()]
    source = "\n".join(inspect.getsource(module) for module in (limits, file_limits))
    return "\n\n".join([*parts, *limits_section(source)]) + "\n"


# --- reading the services' source ---


@dataclass(frozen=True, slots=True)
class Module:
    """A parsed source file of a service."""

    service: str
    tree: ast.Module


def parse_service(folder: Path) -> list[Module]:
    """Parses every Python file of a service."""
    paths = sorted(folder.rglob("*.py"))
    return [Module(folder.name, ast.parse(path.read_text(encoding="utf-8"), str(path))) for path in paths]


def handlers(modules: Sequence[Module]) -> Iterator[Handler]:
    """Yields every method that is decorated with `@handles(MessageType)`."""
    for module in modules:
        for function in functions(module.tree):
            for decorator in function.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "handles":
                    yield Handler(module.service, ast.unparse(decorator.args[0]), reply_of(function))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yields all functions and methods of a module, including nested ones."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def reply_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Returns the name of the message type in a handler's return annotation; empty for None."""
    words = ast.unparse(function.returns).split(" | ") if function.returns else []
    return ", ".join(word for word in words if word != "None")


def listeners(modules: Sequence[Module]) -> Iterator[Listener]:
    """Yields every `actor.bind(subject, *types)`, also of a guest of the gateway.

    The subject must be a call on `subjects`, directly or through a variable that is assigned in the same function.
    """
    for module in modules:
        for function in functions(module.tree):
            assigned = {
                ast.unparse(node.targets[0]): node.value for node in ast.walk(function) if isinstance(node, ast.Assign)
            }
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(_BINDS) and node.args:
                    subject = assigned.get(ast.unparse(node.args[0]), node.args[0])
                    types = tuple(ast.unparse(argument) for argument in node.args[1:])
                    is_queue = any(keyword.arg == "queue" for keyword in node.keywords)
                    yield Listener(module.service, subject_method(subject), types, is_queue)


def subject_method(node: ast.expr) -> str:
    """Returns the name of the method of `Subjects` that an expression calls; empty for other expressions."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr if "subjects" in ast.unparse(node.func.value) else ""
    return ""


# --- sections ---


def subjects_section(modules: Sequence[Module]) -> Iterator[str]:
    """Yields the section with the table of subjects and the services that listen on them."""
    heard: dict[str, list[Listener]] = defaultdict(list)
    for listener in listeners(modules):
        heard[listener.subject_method].append(listener)
    rows: list[tuple[str, str, str, str]] = []
    for name, method in [item for kind in (*Subjects.__bases__, Subjects) for item in vars(kind).items()]:
        if name.startswith("_") or name == "everything" or not inspect.isfunction(method):
            continue
        found = heard[name]
        services = ", ".join(dict.fromkeys(f"{item.service}{' (queue group)' * item.is_queue}" for item in found))
        messages = ", ".join(dict.fromkeys(f"`{message}`" for item in found for message in item.messages))
        rows.append((f"`{pattern(name)}`", services, messages, sentence(method)))
    yield "## Reference: subjects\n\nEach begins with `{namespace}.v{major}.`, which is left out here."
    yield table(("subject", "listens", "messages", "purpose"), rows)


def pattern(name: str) -> str:
    """Returns a subject with its parameters written as `<name>`, without the common prefix of all subjects."""
    parameters = list(inspect.signature(getattr(Subjects, name)).parameters.values())[1:]
    words = ["*" if item.default == "*" else f"<{item.name}>" for item in parameters]
    subjects = Subjects()
    return getattr(subjects, name)(*words).removeprefix(subjects.everything().removesuffix(">"))


def messages_section(modules: Sequence[Module]) -> Iterator[str]:
    """Yields the section with a table of messages for each file of `shared/messages/`."""
    yield (
        "## Reference: messages\n\nFields in the order of the array, with their defaults. A part occurs inside "
        "messages only. `shared/messages/` explains single fields."
    )
    handled: dict[str, list[Handler]] = defaultdict(list)
    for handler in handlers(modules):
        handled[handler.message].append(handler)
    by_module: dict[str, list[type[msgspec.Struct]]] = defaultdict(list)
    for kind in message_types():
        by_module[kind.__module__].append(kind)
    for module, kinds in sorted(by_module.items()):
        rows = [message_row(kind, handled[kind.__name__]) for kind in kinds]
        yield f"### `{module.removeprefix('antiphon.').replace('.', '/')}.py`"
        yield table(("message", "handled by", "answer", "fields", "meaning"), rows)


def message_types() -> list[type[msgspec.Struct]]:
    """Returns all messages and parts that the package exports, sorted by the line of their definition."""
    exported = vars(antiphon.shared.messages).values()
    kinds = [kind for kind in exported if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    return sorted((kind for kind in kinds if kind is not Message and kind is not Part), key=definition_line)


def definition_line(kind: type) -> int:
    """Returns the number of the line at which a class begins in its file."""
    return inspect.getsourcelines(kind)[1]


def message_row(kind: type[msgspec.Struct], found: Sequence[Handler]) -> tuple[str, ...]:
    """Returns the cells of one row of the table of messages."""
    services = ", ".join(dict.fromkeys(handler.service for handler in found))
    replies = ", ".join(dict.fromkeys(f"`{handler.reply}`" for handler in found if handler.reply))
    receiver = services if issubclass(kind, Message) else "part"
    return (f"`{kind.__name__}`", receiver, replies, fields_of(kind), sentence(kind))


def fields_of(kind: type) -> str:
    """Returns the fields of a struct as written in its source, separated by `<br>`."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    return "<br>".join(
        f"`{ast.unparse(node.target)}: {ast.unparse(plain(node.annotation))}"
        + (f" = {ast.unparse(node.value)}`" if node.value else "`")
        for node in definition.body
        if isinstance(node, ast.AnnAssign)
    )


def plain(annotation: ast.expr) -> ast.expr:
    """Returns the type in `Annotated[type, …]`; other annotations unchanged."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        assert isinstance(annotation.slice, ast.Tuple)
        return annotation.slice.elts[0]
    return annotation


def errors_section() -> Iterator[str]:
    """Yields the section with the table of error codes."""
    yield "## Reference: error codes"
    rows = [
        (f"`{name}`", str(code.status), f"`{code.type}`", "yes" if code.retryable else "")
        for name, code in errors.CODES.items()
    ]
    yield table(("code", "HTTP status", "type", "may succeed later or elsewhere"), rows)


def limits_section(source: str) -> Iterator[str]:
    """Yields a table for each section of `shared/limits.py` and `shared/files/limits.py`, whose text is `source`."""
    yield "## Reference: limits"
    tables: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    lines, body, values = source.splitlines(), ast.parse(source).body, vars(limits) | vars(file_limits)
    headings = [(n, line.strip("# -")) for n, line in enumerate(lines, 1) if line.startswith(_SECTION)]
    for index, node in enumerate(body):
        if not isinstance(node, ast.Assign):
            continue
        name = ast.unparse(node.targets[0])
        follower = body[index + 1] if index + 1 < len(body) else None
        reason = docstring_of(follower)
        title = next((text for line, text in reversed(headings) if line < node.lineno), "protocol")
        tables[title].append((f"`{name}`", amount(name, values[name]), reason))
    for title, rows in tables.items():
        yield f"### {title[:1].upper()}{title[1:]}"
        yield table(("limit", "value", "what it bounds"), rows)


def docstring_of(node: ast.stmt | None) -> str:
    """Returns the text, on one line, of a statement that is only a string; empty for other statements."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def amount(name: str, value: object) -> str:
    """Returns a limit's value with its unit, derived from the suffix of its name."""
    if not isinstance(value, int | float):
        return f"`{value!r}`"
    if "_BYTES" in name:
        for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
            if value % size == 0:
                return f"{value // size:,} {unit}"
        return f"{value:,} bytes"
    unit = next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")
    return f"{round(value, 6):,} {unit}".strip()


def sentence(documented: object) -> str:
    """Returns the first paragraph of an object's docstring, on one line."""
    return " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split())


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, tuple("---" for _ in head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in lines)


if __name__ == "__main__":
    sys.exit(main())
