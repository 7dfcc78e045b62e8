"""A request's part of the limits of its API key, from its admission to its end."""

from services.gateway.access.call import Call
from services.gateway.access.quotas import Admission, KeyQuota


class QuotaReservation:
    """Implements `generation.Reservation`. The first method call ends the reservation; later calls have no effect."""

    def __init__(self, quota: KeyQuota, admission: Admission) -> None:
        self._quota = quota
        self._admission: Admission | None = admission

    def withdraw(self) -> None:
        """See Reservation."""
        admission, self._admission = self._admission, None
        if admission is not None:
            self._quota.withdraw(admission)

    def finish(self, tokens: int) -> None:
        """See Reservation."""
        admission, self._admission = self._admission, None
        if admission is not None:
            self._quota.finish(admission, tokens)


async def reserve(quota: KeyQuota, call: Call, tokens: int) -> QuotaReservation:
    """Admits a request with an estimated number of tokens. Raises ServiceError('rate_limit_exceeded').

    Whether the request is admitted or refused, the answer to `call` gets the headers with the remaining quota.
    """
    try:
        return QuotaReservation(quota, await quota.admit(tokens))
    finally:
        call.response_headers = quota.headers()
