"""Options of `antiphon chaos` that contradict each other are refused by name."""

import argparse

import pytest

from antiphon.chaos.options import add_options, read_options
from antiphon.shared.flags import SettingsError


def read(*words: str) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    read_options(parser.parse_args(words))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--minutes=0"], "--minutes"),
        (["--calm=-1"], "--calm"),
        (["--url=http://127.0.0.1:1"], "--run-directory"),
        (["--url=http://127.0.0.1:1", "--run-directory=/tmp/antiphon-1-x", "--model=m"], "--model"),
        (["--token=k"], "--api-key"),
    ],
)
def test_options_that_cannot_be_followed_are_refused(words: list[str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        read(*words)


def test_the_defaults_and_a_server_with_a_key_are_taken() -> None:
    read()
    read("--server=http://127.0.0.1:1", "--run-directory=/tmp/antiphon-1-x", "--api-key=k")
