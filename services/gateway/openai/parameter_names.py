"""Makes the errors of a conversion name the parameters of another API. Pure.

Other APIs convert their bodies to a `ChatBody` or `CompletionBody`. If the values of that body are refused, the error
names OpenAI's parameter; the client must read the name of the parameter that it sent.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from shared.errors import ServiceError


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the parameters in a ServiceError that is raised inside. `names`: the API's own names by OpenAI's."""
    try:
        yield
    except ServiceError as error:
        raise in_names(error, names) from None


def in_names(error: ServiceError, names: Mapping[str, str]) -> ServiceError:
    """Returns the error with other names of parameters, in `param` and where the message quotes them.

    A name also stands for the elements and members of the parameter, such as `messages[2].role`.
    """
    message, param = error.message, error.param
    for old, new in names.items():
        quoted = re.compile(rf"'{re.escape(old)}(?=['\[.])")
        message = quoted.sub(f"'{new}", message)
        param = quoted.sub(f"'{new}", f"'{param}'").strip("'")
    return ServiceError(error.code, message, param=param, retry_after_s=error.retry_after_s)
