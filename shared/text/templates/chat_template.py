"""Renders models' chat templates: Jinja in a sandbox, with the names that templates expect. Pure.

A template is untrusted code. The sandbox denies it access to Python's internals, but does not prevent endless loops or
huge strings; the tokenizer's `render_worker` therefore runs it in a separate process with limits. The dialect (filters,
globals, block trimming, loop controls, the `generation` tag) is that of transformers' `apply_chat_template`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_CUT = "\ue000end of the final message\ue001"
"""Marks the end of a message that is to be continued. The characters are from Unicode's private use area."""

_KINDS_OF_CONTENT = ("string", "iterable", "sequence", "mapping")
"""Jinja's tests with which a template finds out whether the content of a message is a text or a list of parts."""


class TemplateFailedError(Exception):
    """Raised if the template could not be compiled, failed, or refused its input. The message is for the user."""


class ChatTemplate:
    """A compiled template. `constants` are variables of every rendering, such as `bos_token`.

    Construction raises TemplateFailedError if the source cannot be compiled.
    """

    def __init__(self, source: str, constants: Mapping[str, str], output_chars_max: int) -> None:
        self._constants = dict(constants)
        self._output_chars_max = output_chars_max
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            self._wants_parts = _reads_parts_only(environment.parse(source))
        except TemplateSyntaxError as error:
            raise TemplateFailedError(
                f"The chat template is not valid Jinja: {error.message} (line {error.lineno})."
            ) from None
        except (TemplateError, RecursionError, MemoryError, OverflowError) as error:
            raise TemplateFailedError(f"The chat template cannot be compiled: {_describe(error)}.") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
        *,
        continue_final_message: bool = False,
    ) -> str:
        """Returns the conversation as the text of the model's prompt. Raises TemplateFailedError.

        `variables` are further variables of the template, such as `tools`. With `continue_final_message` the text ends
        with the content of the last message, without what the template writes after it.
        """
        if continue_final_message:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _CUT}]
        every: dict[str, Any] = {
            **self._constants,
            "tools": None,
            "documents": None,
            **_with_functions(variables or {}),
            "messages": [_with_arguments(_in_parts(each) if self._wants_parts else each) for each in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._generate(every)
            return _up_to_cut(text) if continue_final_message else text
        except _RefusalError as refusal:
            raise TemplateFailedError(f"The chat template refuses these messages: {refusal.message}") from None
        except TemplateFailedError:
            raise
        except Exception as error:  # a template can raise any exception
            raise TemplateFailedError(f"The chat template failed: {_describe(error)}.") from None

    def _generate(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        room = self._output_chars_max
        for piece in self._template.generate(variables):
            room -= len(piece)
            if room < 0:
                raise TemplateFailedError(f"The conversation is longer than {self._output_chars_max} characters.")
            pieces.append(piece)
        text = "".join(pieces)
        text.encode()  # raises for an unpaired surrogate, which a template can write but which is not valid text
        return text


def _reads_parts_only(tree: nodes.Template) -> bool:
    """Whether a template takes the content of messages as a list of parts, and never as a text.

    Such a template, as llava-hf and SmolVLM publish, loops over a text's characters and writes none of them.
    """
    takes_both = any(test.name in _KINDS_OF_CONTENT for test in tree.find_all(nodes.Test))
    return not takes_both and any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None) -> bool:
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message whose content, if it is a text, is a list with this text."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


class _Arguments(dict[str, Any]):
    """The arguments of a call. Most templates expect an object; some concatenate the arguments as JSON text."""

    def __str__(self) -> str:
        return _to_json(self)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def _with_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message whose calls have arguments in the form in which every template can use them."""
    calls: Sequence[Mapping[str, Any]] | None = message.get("tool_calls")
    if not calls:
        return dict(message)
    functions = [
        {**call["function"], "arguments": _Arguments(call["function"].get("arguments") or {})} for call in calls
    ]
    made = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
    return {**message, "tool_calls": made}


class _Function(dict[str, Any]):
    """A function of a tool. Some templates, such as gpt-oss's, take it for granted that it has a description."""

    def __missing__(self, name: str) -> str:
        if name == "description":
            return ""
        raise KeyError(name)


def _with_functions(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables with tools in the form in which every template can use them."""
    tools: Sequence[Mapping[str, Any]] | None = variables.get("tools")
    if not tools:
        return dict(variables)
    made = [{**tool, "function": _Function(tool["function"])} if "function" in tool else tool for tool in tools]
    return {**variables, "tools": made}


class _RefusalError(TemplateError):
    """The template called `raise_exception`."""


class _GenerationTag(Extension):
    """The tag `{% generation %}…{% endgeneration %}`, which marks the assistant's part for training.

    Here the tag has no effect: its content is rendered.
    """

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """See jinja2.ext.Extension."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _GuardedNamespace(Namespace):
    """Jinja's `namespace()` without names that begin with "_", which would give access to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no parameter `self`, so that `namespace(self=…)` works
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have an attribute {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    untyped = cast(Any, environment)  # jinja2 leaves the two tables untyped
    untyped.filters["tojson"] = _to_json
    del untyped.globals["lipsum"]
    untyped.globals |= {
        "namespace": _GuardedNamespace,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own `tojson` escapes characters for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _up_to_cut(text: str) -> str:
    before, mark, _ = text.rpartition(_CUT)
    if not mark:
        raise TemplateFailedError("The chat template does not write the final message, so it cannot be continued.")
    return before


def _raise_exception(message: object) -> None:
    raise _RefusalError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _describe(error: BaseException) -> str:
    kinds: dict[type[BaseException], str] = {
        MemoryError: "it needs too much memory",
        RecursionError: "it is nested too deeply",
    }
    return kinds.get(type(error)) or f"{type(error).__name__}: {error}"[:500].rstrip(".")
