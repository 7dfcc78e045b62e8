"""Preserves a cancellation that a library would swallow. Called by the modules that wait with nats-py."""

import asyncio
import contextlib
from collections.abc import Generator


@contextlib.contextmanager
def kept_cancellation() -> Generator[None]:
    """Raises CancelledError at the end of the block if the task was cancelled within it but the block continued.

    nats-py waits with `asyncio.wait_for`. In Python 3.11 `wait_for` returns the result and drops the cancellation if
    the result and the cancellation arrive in the same iteration of the event loop. A task that works in a loop would
    then never end. (Fixed in Python 3.12.)
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    yield
    if task.cancelling() > before:
        raise asyncio.CancelledError
