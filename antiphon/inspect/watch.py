"""`antiphon watch`: polls a running system and prints every violated invariant.

The invariants are those of `antiphon.inspect.invariants`.
"""

import time

from antiphon.client import Client, ServerError
from antiphon.inspect.invariants import OWNERLESS_S, Invariants

ONCE_S = OWNERLESS_S + 1.0
"""Duration of `--once`, seconds: work without an owner is detected after `OWNERLESS_S`."""


def run(client: Client, *, interval_s: float, once: bool) -> int:
    """Polls every `interval_s` until Ctrl-C, or for `ONCE_S`. Returns 1 if `once` and there was a breach, else 0."""
    invariants, began, found, looks = Invariants(), time.monotonic(), 0, 0
    while True:
        breaches = _look(client, invariants)
        looks += 1
        found += len(breaches)
        for breach in breaches:
            print(f"{time.strftime('%H:%M:%S')}  {breach}", flush=True)
        if once and time.monotonic() - began >= ONCE_S:
            print(f"{found} breaches in {looks} looks" if found else f"nothing is wrong ({looks} looks)", flush=True)
            return 1 if found else 0
        time.sleep(interval_s)


def _look(client: Client, invariants: Invariants) -> list[str]:
    try:
        return invariants.check(client.get("/admin/topology"))
    except ServerError as error:
        return [f"the server does not answer: {error}"]
