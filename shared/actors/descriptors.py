"""The number of files and connections that this process may have open: raised as far as its user may raise it."""

import resource

_RAISED_TO_MAX = 2**20
"""Some systems have a limit of a billion, and there are programs that try every number up to the limit."""


def raise_limit() -> int:
    """Raises this process' limit of open descriptors, which its children inherit. Returns the limit."""
    soft, hard = (_RAISED_TO_MAX if one == resource.RLIM_INFINITY else one for one in _limits())
    wanted = min(hard, _RAISED_TO_MAX)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, _limits()[1]))
    return max(soft, wanted)


def _limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)
