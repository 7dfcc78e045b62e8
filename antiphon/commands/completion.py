"""Scripts with which bash, zsh and fish complete commands, flags and their choices. Made from the parser; pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from antiphon.commands.parser import Parser

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag: its names with dashes, the choices of its value, and whether a value must follow it."""

    names: tuple[str, ...]
    help: str
    choices: tuple[str, ...] = ()
    takes_value: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A command: its flags, the choices of its arguments, and its subcommands by their names."""

    help: str
    flags: tuple[Flag, ...] = ()
    choices: tuple[str, ...] = ()
    kinds: "Mapping[str, Node]" = field(default_factory=dict[str, "Node"])


def tree_of(parser: Parser, help: str = "") -> Node:
    """Returns what can be completed after a command."""
    flags: list[Flag] = []
    choices: list[str] = []
    for action in parser.shown_actions():
        given = tuple(map(str, action.choices or ()))
        if action.option_strings:
            takes = action.nargs not in (0, "?")
            text = _one_line(action.help or "")
            flags.append(Flag(names=tuple(action.option_strings), help=text, choices=given, takes_value=takes))
        elif not isinstance(action.choices, dict):
            choices += given
    kinds = {name: tree_of(kind, kind.description or "") for name, kind in parser.kinds().items()}
    return Node(help=_one_line(help), flags=tuple(flags), choices=tuple(choices), kinds=kinds)


def script(shell: str, root: Node) -> str:
    """Returns the script for a shell of `SHELLS`."""
    lines = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](root)
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    """Returns the beginning of a help text, up to the first parenthesis or semicolon."""
    return text.replace("%(default)s", "").replace("%%", "%").partition(" (")[0].partition(";")[0].strip()


def _nodes(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yields the commands with their paths, such as `/models/set`; the path of the root is empty."""
    yield path, node
    for name, kind in node.kinds.items():
        yield from _nodes(kind, f"{path}/{name}")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _values(root: Node) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yields (path, name, choices) of each flag that a value follows; the choices may be empty."""
    for path, node in _nodes(root):
        for flag in node.flags:
            if flag.takes_value or flag.choices:
                yield from ((path, name, flag.choices) for name in flag.names)


def _cases(root: Node) -> dict[tuple[str, ...], list[str]]:
    """Returns the patterns "PATH FLAG" by the choices of the flag's value."""
    found: dict[tuple[str, ...], list[str]] = {}
    for path, name, choices in _values(root):
        found.setdefault(choices, []).append(f'"{path} {name}"')
    return found


def _bash(root: Node) -> Iterator[str]:
    yield "# Completion of antiphon for bash, written by `antiphon completion bash`."
    yield "_antiphon() {"
    yield '  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} at="" i words=""'
    yield "  # bash splits words at '='."
    yield '  if [ "$cur" = "=" ]; then cur=""'
    yield '  elif [ "$prev" = "=" ]; then prev=${COMP_WORDS[COMP_CWORD-2]}; fi'
    yield "  for ((i = 1; i < COMP_CWORD; i++)); do"
    yield '    case "$at/${COMP_WORDS[i]}" in'
    yield f'      {"|".join(path for path, _ in _nodes(root) if path)}) at="$at/${{COMP_WORDS[i]}}" ;;'
    yield "    esac"
    yield "  done"
    yield "  COMPREPLY=()"
    yield '  case "$at $prev" in'
    for choices, patterns in _cases(root).items():
        words = _quoted(" ".join(choices))
        action = f'COMPREPLY=($(compgen -W {words} -- "$cur"));' if choices else ""
        yield f"    {'|'.join(patterns)}) {action} return ;;"
    yield "  esac"
    yield '  case "$at" in'
    for path, node in _nodes(root):
        flags = " ".join(name for flag in node.flags for name in flag.names)
        others = " ".join((*node.kinds, *node.choices))
        yield f'    "{path}") if [[ $cur == -* ]]; then words="{flags}"; else words="{others}"; fi ;;'
    yield "  esac"
    yield '  COMPREPLY=($(compgen -W "$words" -- "$cur"))'
    yield "}"
    yield "# Where there is nothing else to complete, bash completes file names."
    yield "complete -o default -F _antiphon antiphon"


def _described(names: Iterable[tuple[str, str]]) -> str:
    """Returns words for zsh's `_describe`."""
    return " ".join(_quoted(f"{name.replace(':', chr(92) + ':')}:{text}") for name, text in names)


def _zsh(root: Node) -> Iterator[str]:
    yield "#compdef antiphon"
    yield "# Completion of antiphon for zsh, written by `antiphon completion zsh`."
    yield "_antiphon() {"
    yield '  local cur=${words[CURRENT]} prev=${words[CURRENT-1]} at="" i'
    yield "  local -a found"
    yield "  for ((i = 2; i < CURRENT; i++)); do"
    yield '    case "$at/${words[i]}" in'
    yield f'      ({"|".join(path for path, _ in _nodes(root) if path)}) at="$at/${{words[i]}}" ;;'
    yield "    esac"
    yield "  done"
    yield "  if [[ $cur == --*=* ]]; then prev=${cur%%=*}; compset -P '*='; fi"
    yield '  case "$at $prev" in'
    for choices, patterns in _cases(root).items():
        action = f"compadd -- {' '.join(map(_quoted, choices))}" if choices else "_files"
        yield f"    ({'|'.join(patterns)}) {action}; return ;;"
    yield "  esac"
    yield '  case "$at" in'
    for path, node in _nodes(root):
        flags = _described((name, flag.help) for flag in node.flags for name in flag.names)
        others = _described(
            [*((name, kind.help) for name, kind in node.kinds.items()), *((c, "") for c in node.choices)]
        )
        yield f'    ("{path}") if [[ $cur == -* ]]; then found=({flags}); else found=({others}); fi ;;'
    yield "  esac"
    yield "  if (( $#found )); then _describe 'antiphon' found; else _files; fi"
    yield "}"
    yield 'if [[ $funcstack[1] == _antiphon ]]; then _antiphon "$@"; else compdef _antiphon antiphon; fi'


def _fish(root: Node) -> Iterator[str]:
    yield "# Completion of antiphon for fish, written by `antiphon completion fish`."
    yield "complete -c antiphon -f"
    for name, node in root.kinds.items():
        yield f"complete -c antiphon -n __fish_use_subcommand -a {name} -d {_quoted(node.help)}"
    yield from _fish_flags("__fish_use_subcommand", root)
    for name, node in root.kinds.items():
        # `bench serve` contains the word `serve`, which is a command too.
        above = [other for other, one in root.kinds.items() if name in one.kinds]
        seen = f"__fish_seen_subcommand_from {name}"
        seen += f"; and not __fish_seen_subcommand_from {' '.join(above)}" if above else ""
        kinds = " ".join(node.kinds)
        for kind, one in node.kinds.items():
            unseen = _quoted(f"{seen}; and not __fish_seen_subcommand_from {kinds}")
            yield f"complete -c antiphon -n {unseen} -a {kind} -d {_quoted(one.help)}"
            yield from _fish_flags(_quoted(f"{seen}; and __fish_seen_subcommand_from {kind}"), one)
        if node.choices:
            yield f"complete -c antiphon -n {_quoted(seen)} -a {_quoted(' '.join(node.choices))}"
        yield from _fish_flags(_quoted(seen), node)


def _fish_flags(condition: str, node: Node) -> Iterator[str]:
    for flag in node.flags:
        names = " ".join(_fish_name(name) for name in flag.names)
        value = f" -x -a {_quoted(' '.join(flag.choices))}" if flag.choices else " -r -F" if flag.takes_value else ""
        yield f"complete -c antiphon -n {condition} {names}{value} -d {_quoted(flag.help)}"


def _fish_name(name: str) -> str:
    if name.startswith("--"):
        return f"-l {name[2:]}"
    return f"-s {name[1:]}" if len(name) == 2 else f"-o {name[1:]}"
