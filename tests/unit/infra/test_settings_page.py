"""The page of all settings is what they are."""

from infra.checks.settings_page import PAGE, render


def test_the_page_of_settings_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run `python -m infra.checks.settings_page`"
