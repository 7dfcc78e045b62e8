import pytest

from antiphon.shared.text.detokenization.stop_strings import StopStrings


def test_text_that_cannot_begin_a_stop_string_is_shown_at_once() -> None:
    assert StopStrings(["###"], False).push("hello") == ("hello", None)


def test_text_that_may_begin_a_stop_string_is_held_back_and_shown_when_it_did_not() -> None:
    search = StopStrings(["<|end|>"], False)
    assert search.push("a <|e") == ("a ", None)
    assert search.push("nd") == ("", None)
    assert search.push("!") == ("<|end!", None)


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one STOP")])
def test_text_ends_before_or_behind_the_stop_string(include: bool, text: str) -> None:
    assert StopStrings(["STOP"], include).push("one STOP two") == (text, "STOP")


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert StopStrings(["bcd", "c"], False).push("abcd") == ("ab", "c")


def test_of_stop_strings_that_end_together_the_longest_wins() -> None:
    assert StopStrings(["c", "abc", "bc"], False).push("xabc") == ("x", "abc")


def test_what_is_held_at_the_end_is_shown() -> None:
    search = StopStrings(["END"], False)
    assert search.push("the E") == ("the ", None)
    assert search.finish() == "E"
    assert search.finish() == ""


def test_a_stop_string_may_begin_before_and_end_behind_min_tokens() -> None:
    search = StopStrings(["aa"], False)
    assert search.push("aa", counts=False) == ("a", None)
    assert search.push("a") == ("", "aa")
