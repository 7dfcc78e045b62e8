"""docs/reference/request-fields.md is that of the table."""

from infra.checks.fields_page import PAGE, render


def test_the_page_of_fields_is_that_of_the_table():
    assert PAGE.read_text(encoding="utf-8") == render(), "run `python -m infra.checks.fields_page`"
