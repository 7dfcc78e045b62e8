"""A request's part of the limits of its API key, from its admission to its end."""

from antiphon.services.gateway.edge.access.quotas import Admission, KeyQuota


class QuotaReservation:
    """Implements `generation.Reservation`. The first method call ends the reservation; later calls have no effect."""

    def __init__(self, quota: KeyQuota, *admissions: Admission) -> None:
        self._quota = quota
        self._admissions = admissions

    def withdraw(self) -> None:
        """See Reservation."""
        admissions, self._admissions = self._admissions, ()
        for admission in admissions:
            self._quota.withdraw(admission)

    def finish(self, tokens: int) -> None:
        """See Reservation."""
        admissions, self._admissions = self._admissions, ()
        for admission in admissions:
            self._quota.finish(admission, tokens)
            tokens = 0

    def with_admission(self, admission: Admission) -> "QuotaReservation":
        """Returns a reservation of `admission` and everything that this one has, and ends this one."""
        admissions, self._admissions = self._admissions, ()
        return QuotaReservation(self._quota, admission, *admissions)
