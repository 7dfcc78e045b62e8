"""Renames parameters in the errors of a conversion, for APIs that are converted to OpenAI's. Pure.

Other APIs convert their bodies to a `ChatBody` or `CompletionBody`. If a value of that body is refused, the error names
OpenAI's parameter; it must be renamed to the parameter that the client sent.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from antiphon.shared.errors import ServiceError

_NUMBER, _ANY_NUMBER = re.escape("[]"), r"\[(\d*)\]"


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the parameters in a ServiceError that is raised inside. `names`: the API's own names by OpenAI's."""
    try:
        yield
    except ServiceError as error:
        raise in_names(error, names) from None


def in_names(error: ServiceError, names: Mapping[str, str]) -> ServiceError:
    """Returns the error with other names of parameters, in `param` and where the message quotes them.

    A name also stands for the elements and members of the parameter, such as `messages[2].role`. `[]` in both names
    stands for the number of an element.
    """
    message = error.message
    for old, new in names.items():
        message = _replaced(message, old, new)
    return ServiceError(error.code, message, param=new_name(error.param, names), retry_after_s=error.retry_after_s)


def new_name(param: str, names: Mapping[str, str]) -> str:
    """Returns the name of a parameter in the other API."""
    for old, new in names.items():
        param = _replaced(f"'{param}'", old, new)[1:-1]
    return param


def _replaced(text: str, old: str, new: str) -> str:
    """Returns the text with another name of a quoted parameter. A client may have made the name up: it may be any."""

    def written(found: re.Match[str]) -> str:
        number = found[1] if found.re.groups else ""
        return "'" + new.replace("[]", f"[{number}]", 1)

    return _quoted(old).sub(written, text)


def _quoted(name: str) -> re.Pattern[str]:
    """Returns the pattern of a quoted parameter with this name, or of its elements and members."""
    return re.compile(rf"'{re.escape(name).replace(_NUMBER, _ANY_NUMBER, 1)}(?=['\[.])")
