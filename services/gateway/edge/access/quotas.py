"""Admits requests within the limits of their API keys, which apply to all gateways together.

The state of a key's limits (`account`) is in a key-value store on the bus and is changed by compare-and-set. A gateway
reserves a part of the quota in advance (its share), so most requests are admitted without a round trip. While the store
cannot be reached, each gateway counts alone, from the last state that it has read: several gateways together may then
admit more than the limit. The beginning and the end of such a time are logged.
"""

import asyncio
import logging
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from antiphon.services.gateway.edge.access.account import (
    Account,
    Amounts,
    Grant,
    Need,
    exchange,
    full,
    refilled,
    seconds_until_full,
)
from antiphon.shared import limits
from antiphon.shared.bus.key_value import KeyValueStore, StoreUnavailableError
from antiphon.shared.clock import Clock
from antiphon.shared.errors import ServiceError
from antiphon.shared.security.api_keys import ApiKey

log = logging.getLogger(__name__)
_DECODER = msgspec.msgpack.Decoder(Account)
_ATTEMPTS_MAX = 16
"""Maximum number of writes that conflict with writes of other gateways, before this gateway counts alone."""
_PAUSE_S = 0.002
_SMOOTHING = 0.2
"""Weight of the newest request in the moving average of the duration of a key's requests."""


@dataclass(slots=True, kw_only=True)
class Quotas:
    """The limits of all keys at one gateway. `gateway`: its name among the gateways that share the store.

    Without a store this gateway counts alone.
    """

    clock: Clock
    gateway: str = ""
    store: KeyValueStore | None = None
    _keys: dict[str, "KeyQuota"] = field(default_factory=dict[str, "KeyQuota"])
    _alone_until: float = -math.inf
    _is_alone: bool = False

    def of(self, key: ApiKey) -> "KeyQuota":
        """Returns the limits that the key file currently gives a key."""
        quota = self._keys.get(key.name)
        if quota is None:
            if len(self._keys) >= limits.API_KEYS_MAX:
                self._keys = {name: each for name, each in self._keys.items() if each.is_in_use}
            quota = self._keys[key.name] = KeyQuota(self, key)
        quota.key = key
        return quota

    def reachable(self) -> KeyValueStore | None:
        """Returns the store; None if this gateway counts alone now."""
        return None if self.clock.monotonic() < self._alone_until else self.store

    def failed(self, reason: object) -> None:
        """Makes this gateway count alone for a while."""
        self._alone_until = self.clock.monotonic() + limits.QUOTA_STORE_RETRY_S
        if not self._is_alone:
            log.warning("limits of API keys are counted by each gateway alone: %s", reason)
        self._is_alone = True

    def worked(self) -> None:
        """Records that the store has answered, so that this gateway no longer counts alone."""
        if self._is_alone:
            log.info("limits of API keys are counted by all gateways together again")
        self._is_alone = False


@dataclass(frozen=True, slots=True)
class Admission:
    """What has been reserved for a request, and the time of its admission (monotonic seconds)."""

    reserved: Need
    at: float


class KeyQuota:
    """The limits of one key at one gateway."""

    def __init__(self, quotas: Quotas, key: ApiKey) -> None:
        self.key = key
        self._quotas = quotas
        self._account = full(key, self._wall_s())
        """The shared state that this gateway has read last, without the share that it took."""
        self._seen_at = -math.inf
        self._left = Amounts()
        """The unused rest of the gateway's share. Negative: more than the share was used, and the excess is not yet
        deducted from the account.
        """
        self._running = 0
        """Places of the requests in progress."""
        self._places = 0
        """Places that the account counts for this gateway; at least `_running` between exchanges."""
        self._mean_s = 0.0
        self._exchanging = asyncio.Lock()
        self._returning: asyncio.Task[None] | None = None

    @property
    def is_in_use(self) -> bool:
        """Whether requests of the key are in progress, or the gateway has a share to give back."""
        return bool(self._running) or self._returning is not None

    async def admit(self, tokens: int, *, requests: int = 1, places: int = 1) -> Admission:
        """Reserves a request with `tokens` tokens, prompt and output together, or more for one that is admitted.

        `places`: how many of the requests that the key may have at the same time it counts for. Raises
        ServiceError('rate_limit_exceeded') if a limit has no room, with the time until there is room. If the call is
        cancelled, nothing is reserved.
        """
        key = self.key
        amounts = Amounts(min(requests, key.requests_per_minute), min(tokens, key.tokens_per_minute))
        need = Need(amounts, places)
        if not self._exchanging.locked() and self._covers(need):
            return self._reserve(need)
        admitting = asyncio.get_running_loop().create_task(self._admit(need))
        try:
            return await asyncio.shield(admitting)
        except asyncio.CancelledError:
            # The exchange is not cancelled: the store may already have applied it, and then this gateway must know the
            # result.
            admitting.add_done_callback(self._withdraw_unused)
            raise

    def withdraw(self, admission: Admission) -> None:
        """Cancels the admission of a request that was not run. To be called instead of `finish`."""
        self._running -= admission.reserved.places
        self._left += admission.reserved.amounts
        self._return_later()

    def finish(self, admission: Admission, tokens: int) -> None:
        """Ends an admitted request that has used this number of tokens. To be called once for each admission."""
        self._running -= admission.reserved.places
        duration_s = self._now() - admission.at
        self._mean_s += (duration_s - self._mean_s) * (_SMOOTHING if self._mean_s else 1.0)
        if self.key.tokens_per_minute:
            self._left += Amounts(0.0, admission.reserved.amounts.tokens - tokens)
        self._return_later()

    def headers(self) -> Mapping[str, str]:
        """Returns the response headers with the remaining quota of each limit that the key has."""
        account = refilled(self._account, self.key, self._wall_s())
        level = Amounts(account.requests, account.tokens) + self._left
        seconds = seconds_until_full(
            msgspec.structs.replace(account, requests=level.requests, tokens=level.tokens), self.key
        )
        told: dict[str, str] = {}
        for name, limit, left, reset_s in (
            ("requests", self.key.requests_per_minute, level.requests, seconds.requests),
            ("tokens", self.key.tokens_per_minute, level.tokens, seconds.tokens),
        ):
            if limit:
                told[f"x-ratelimit-limit-{name}"] = str(limit)
                told[f"x-ratelimit-remaining-{name}"] = str(min(limit, max(0, math.floor(left))))
                told[f"x-ratelimit-reset-{name}"] = duration_text(reset_s)
        return told

    # --- admitting ---

    async def _admit(self, need: Need) -> Admission:
        async with self._exchanging:
            if not self._covers(need):
                self._refuse_known(need)
                grant = await self._exchange(need)
                if grant.lacking is not None:
                    raise self._refusal(grant)
            return self._reserve(need)

    def _reserve(self, need: Need) -> Admission:
        self._left -= need.amounts
        self._running += need.places
        self._return_later()
        return Admission(need, self._now())

    def _withdraw_unused(self, admitting: "asyncio.Task[Admission]") -> None:
        if not admitting.cancelled() and admitting.exception() is None:
            self.withdraw(admitting.result())

    # --- the share of this gateway ---

    def _covers(self, need: Need) -> bool:
        has_places = not self.key.concurrent_requests or self._places >= self._running + need.places
        return has_places and self._left.covers(need.amounts)

    def _refuse_known(self, need: Need) -> None:
        """Refuses without a round trip if the last known state has no room; other gateways can only have used more."""
        if self._now() - self._seen_at < limits.QUOTA_LEASE_S:
            _, grant = self._applied(self._account, need)
            if grant.lacking in ("requests", "tokens"):
                raise self._refusal(grant)

    async def _exchange(self, need: Need | None) -> Grant:
        """Returns the rest of the share to the store, and takes `need` and a new share, in one compare-and-set."""
        try:
            store = self._quotas.reachable()
            if store is not None:
                grant = await self._exchange_with(store, need)
                self._quotas.worked()
                return grant
        except StoreUnavailableError as error:
            self._quotas.failed(error)
        left, running = self._left, self._running
        account, grant = self._applied(self._account, need)
        self._took(account, grant, left, running, need)
        return grant

    async def _exchange_with(self, store: KeyValueStore, need: Need | None) -> Grant:
        name = f"key.{self.key.name}"
        for attempt in range(_ATTEMPTS_MAX):
            entry = await store.get(name)
            known = _decoded(entry.value) if entry else None
            left, running = self._left, self._running
            account, grant = self._applied(known or full(self.key, self._wall_s()), need)
            value = msgspec.msgpack.encode(account)
            if await store.replace(name, value, entry.revision if entry else 0) is not None:
                self._took(account, grant, left, running, need)
                return grant
            await asyncio.sleep(random.uniform(0, _PAUSE_S * 2 ** min(attempt, 5)))
        raise StoreUnavailableError(f"other gateways write the limits of {self.key.name!r} all the time")

    def _applied(self, account: Account, need: Need | None) -> tuple[Account, Grant]:
        return exchange(account, self.key, self._wall_s(), self._quotas.gateway, self._left, self._running, need)

    def _took(self, account: Account, grant: Grant, left: Amounts, running: int, need: Need | None) -> None:
        """Applies an exchange. `left`, `running`: the values that were exchanged; they may have changed since."""
        self._account, self._seen_at = account, self._now()
        self._left = self._left - left + grant.amounts
        granted = need.places if need is not None and grant.lacking is None else 0
        self._places = running + granted if self.key.concurrent_requests else 0

    def _return_later(self) -> None:
        if self._returning is None:
            self._returning = asyncio.get_running_loop().create_task(self._return())

    async def _return(self) -> None:
        """Returns an old share to the store. If requests in progress are limited, also confirms their number there."""
        try:
            while self._left != Amounts() or (self._running and self.key.concurrent_requests) or self._places:
                await asyncio.sleep(limits.QUOTA_LEASE_S)
                async with self._exchanging:
                    await self._exchange(None)
        finally:
            self._returning = None

    # --- refusals ---

    def _refusal(self, grant: Grant) -> ServiceError:
        key, wait_s = self.key, grant.wait_s
        limit = {
            "requests": f"{key.requests_per_minute} requests per minute",
            "tokens": f"{key.tokens_per_minute} tokens per minute",
            "concurrent": f"{key.concurrent_requests} requests at the same time",
        }[grant.lacking or "requests"]
        if grant.lacking == "concurrent":
            wait_s = self._mean_s / max(1, key.concurrent_requests)
        message = f"The API key {key.name!r} has reached its limit of {limit}. Try again in {duration_text(wait_s)}."
        return ServiceError("rate_limit_exceeded", message, retry_after_s=wait_s)

    def _now(self) -> float:
        return self._quotas.clock.monotonic()

    def _wall_s(self) -> float:
        return self._quotas.clock.time_ns() / 1e9


def duration_text(seconds: float) -> str:
    """Returns a duration in the format of OpenAI's headers: `20ms`, `1.5s`, `6m0s`, `1h2m3s`."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    if seconds < 60:
        return f"{math.ceil(1000 * seconds) / 1000:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + f"{minutes}m{rest}s"


def _decoded(value: bytes) -> Any:
    """Returns the account; None if another version of this software wrote it in another format."""
    try:
        return _DECODER.decode(value)
    except msgspec.DecodeError:
        return None
