"""The shared state of one key's rate limits, and how a gateway reserves a part of the quota. Pure.

The limits on requests and on tokens are token buckets: a bucket holds at most one minute's quota and is refilled
continuously. A gateway takes what the current request needs and, in advance for later requests, what the bucket gains
in `QUOTA_LEASE_S`. When the length of an answer is known, the gateway returns unused tokens or takes more; this may
overdraw a bucket. The account also has the number of places that the requests in progress at each gateway have (a
request has one for each of its sequences, at least one), and the time at which that gateway last confirmed this number.
"""

import math
from dataclasses import dataclass
from typing import Literal

import msgspec

from antiphon.shared import limits
from antiphon.shared.security.api_keys import ApiKey

MINUTE_S = 60.0
SKEW_S = 5.0
"""Maximum difference between the clocks of gateways, seconds. A stored time further in the future is ignored, because
the buckets would not be refilled until then.
"""
Limit = Literal["requests", "tokens", "concurrent"]


@dataclass(frozen=True, slots=True)
class Amounts:
    """Numbers of requests and tokens; fractions and negative numbers are possible."""

    requests: float = 0.0
    tokens: float = 0.0

    def __add__(self, other: "Amounts") -> "Amounts":
        return Amounts(self.requests + other.requests, self.tokens + other.tokens)

    def __sub__(self, other: "Amounts") -> "Amounts":
        return Amounts(self.requests - other.requests, self.tokens - other.tokens)

    def covers(self, need: "Amounts") -> bool:
        """Whether both numbers are at least those of `need`."""
        return self.requests >= need.requests and self.tokens >= need.tokens


@dataclass(frozen=True, slots=True)
class Need:
    """What a request needs: amounts of the buckets, and places among those that the key may have at the same time."""

    amounts: Amounts
    places: int


class Held(msgspec.Struct, frozen=True, array_like=True):
    """Number of places that requests have at one gateway. `at`: when the gateway last confirmed it, Unix seconds."""

    count: int
    at: float


class Account(msgspec.Struct, frozen=True, array_like=True):
    """The remaining quota of a key. `at`: the time up to which the buckets are refilled, Unix seconds.

    The bucket of a limit that the key does not have is infinite, so that it is full when the key gets the limit.
    """

    requests: float
    tokens: float
    at: float
    held: dict[str, Held]


@dataclass(frozen=True, slots=True)
class Grant:
    """Result of an exchange. If `lacking` is set, nothing was taken: this limit has no room for `wait_s` seconds.

    `wait_s` is 0 for the limit on requests in progress, because it is unknown when one of them ends.
    """

    amounts: Amounts = Amounts()
    lacking: Limit | None = None
    wait_s: float = 0.0


def full(key: ApiKey, now: float) -> Account:
    """Returns the account of a key with full buckets, for a key that has not been used recently."""
    return Account(_capacity(key.requests_per_minute), _capacity(key.tokens_per_minute), now, {})


def refilled(account: Account, key: ApiKey, now: float) -> Account:
    """Returns the account with its buckets refilled up to `now`. A time before the last refill adds nothing."""
    ahead = account.at > now + SKEW_S
    passed = max(0.0, now - account.at) / MINUTE_S
    return msgspec.structs.replace(
        account,
        requests=min(_capacity(key.requests_per_minute), account.requests + passed * key.requests_per_minute),
        tokens=min(_capacity(key.tokens_per_minute), account.tokens + passed * key.tokens_per_minute),
        at=now if ahead else max(account.at, now),
    )


def exchange(
    account: Account, key: ApiKey, now: float, gateway: str, returned: Amounts, running: int, need: Need | None
) -> tuple[Account, Grant]:
    """Puts `returned` back into the buckets, takes `need` and a share for later requests; returns account and grant.

    `running`: number of the places that the gateway's requests have, without those that are needed now. `need` is None
    if nothing is needed; if not None, it is at most the size of the buckets, as `KeyQuota.admit` ensures.
    """
    account = refilled(account, key, now)
    level = Amounts(account.requests, account.tokens) + returned
    level = Amounts(
        min(level.requests, _capacity(key.requests_per_minute)), min(level.tokens, _capacity(key.tokens_per_minute))
    )
    held = {
        name: each for name, each in account.held.items() if name != gateway and now - each.at < limits.QUOTA_HOLD_S
    }
    grant = Grant() if need is None else _grant(level, key, sum(each.count for each in held.values()) + running, need)
    level -= grant.amounts
    count = running + (need.places if need is not None and grant.lacking is None else 0)
    if key.concurrent_requests and count:
        held[gateway] = Held(count, now)
    return Account(level.requests, level.tokens, account.at, held), grant


def seconds_until_full(account: Account, key: ApiKey) -> Amounts:
    """Returns the seconds until the buckets are full; 0 for a limit that the key does not have."""
    return Amounts(
        _seconds(key.requests_per_minute - account.requests, key.requests_per_minute),
        _seconds(key.tokens_per_minute - account.tokens, key.tokens_per_minute),
    )


def _grant(level: Amounts, key: ApiKey, in_progress: int, need: Need) -> Grant:
    if key.concurrent_requests and in_progress + need.places > key.concurrent_requests:
        return Grant(lacking="concurrent")
    amounts = need.amounts
    waits: dict[Limit, float] = {
        "requests": _seconds(amounts.requests - level.requests, key.requests_per_minute),
        "tokens": _seconds(amounts.tokens - level.tokens, key.tokens_per_minute),
    }
    lacking = max(waits, key=waits.__getitem__)
    if waits[lacking] > 0:
        return Grant(lacking=lacking, wait_s=waits[lacking])
    return Grant(
        Amounts(
            _with_share(amounts.requests, level.requests, key.requests_per_minute),
            _with_share(amounts.tokens, level.tokens, key.tokens_per_minute),
        )
    )


def _capacity(per_minute: int) -> float:
    return per_minute or math.inf


def _with_share(need: float, level: float, per_minute: int) -> float:
    return min(level, need + per_minute / MINUTE_S * limits.QUOTA_LEASE_S) if per_minute else 0.0


def _seconds(amount: float, per_minute: int) -> float:
    return max(0.0, amount) / per_minute * MINUTE_S if per_minute else 0.0
