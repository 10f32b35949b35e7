"""The table of HTTP statuses says everything once."""

from __future__ import annotations

from holdfast import errors
from holdfast.errors import HoldfastError, RateLimited, Unauthenticated
from holdfast.server.errors import STATUS, error_response, status_of


def every(kind: type[HoldfastError] = HoldfastError) -> list[type[HoldfastError]]:
    """An error class and all classes below it."""
    return [kind, *(below for child in kind.__subclasses__() for below in every(child))]


def test_every_error_has_the_status_of_its_nearest_listed_base() -> None:
    assert all(400 <= status_of(kind) <= 507 or status_of(kind) == 202 for kind in every())
    assert status_of(errors.UnknownSession) == 404
    assert status_of(errors.InvalidSchedule) == 422
    assert status_of(errors.BudgetExceeded) == 429
    assert status_of(errors.HostBusy) == 503
    assert status_of(errors.StoreFull) == 503
    assert status_of(errors.ToolFailed) == 500


def test_no_entry_of_the_table_repeats_the_status_of_its_base() -> None:
    for kind, status in STATUS.items():
        if kind is not HoldfastError:
            assert status != status_of(kind.__mro__[1]), kind


def test_a_response_says_how_to_go_on() -> None:
    assert (b"retry-after", b"1") in error_response(RateLimited("slow down")).headers
    assert (b"www-authenticate", b'Bearer realm="holdfast"') in error_response(Unauthenticated("who")).headers
