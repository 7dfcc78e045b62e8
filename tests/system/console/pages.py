"""Addresses of the console's views. No fixtures."""

from tests.system.served import Served


def address(served: Served, view: str = "") -> str:
    return f"http://127.0.0.1:{served.port}/{view and '#/' + view}"
