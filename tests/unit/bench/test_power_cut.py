"""What `make power-cut` makes of the answers of a batch."""

from typing import Any

from bench.reliability.power_cut import OUTPUT_TOKENS, Told, compare, make_lines


def answer(name: str, token_ids: list[int] | None) -> dict[str, Any]:
    body = {"choices": [{"token_ids": token_ids}]}
    return {"custom_id": name, "response": {"status_code": 200 if token_ids else 500, "body": body}}


REST: dict[str, Any] = {"cuts": (1,), "open_at_cuts": (2,), "seconds": 2.0, "status": "completed"}
LINES = make_lines(4)
RIGHT: dict[str, list[int] | None] = {f"item-{number}": [number, 7] for number in range(4)}
FOUND = [answer(f"item-{number}", [number, 7]) for number in range(4)]


def test_equal_answers_once_each_are_good() -> None:
    assert compare(LINES, FOUND, RIGHT, **REST).good
    assert not compare(LINES, FOUND, RIGHT, **{**REST, "status": "expired"}).good


def test_what_is_missing_repeated_failed_or_different_is_named() -> None:
    found = [answer("item-0", None), answer("item-1", [1, 8]), answer("item-2", [2, 7]), answer("item-2", [2, 7])]
    report = compare(LINES, found, RIGHT, **REST)
    assert (report.missing, report.repeated) == (("item-3",), ("item-2",))
    assert (report.failed, report.different) == (("item-0",), ("item-1",))
    assert not report.good


def test_a_response_that_ends_twice_never_or_with_other_tokens_is_named() -> None:
    right = [Told([[1]], 1), Told([[2]], 1), Told([[3]], 1), Told([[4]], 1), Told([[5]], 1)]
    told = [Told([[1]], 1), Told([[2]], 2), Told([[3]], 0), Told([[9]], 1), Told(None, 1)]
    assert compare(LINES, FOUND, RIGHT, right, right, **REST).good
    report = compare(LINES, FOUND, RIGHT, told, right, **REST)
    assert (report.repeated, report.missing) == (("response-1",), ("response-2",))
    assert (report.different, report.failed) == (("response-3",), ("response-4",))
    assert not report.good


def test_the_requests_differ_in_length_seed_and_temperature() -> None:
    bodies = [line["body"] for line in make_lines(100)]
    assert {body["temperature"] for body in bodies} == {0, 1}
    assert len({body["seed"] for body in bodies}) == 100
    assert OUTPUT_TOKENS[0] <= min(body["max_tokens"] for body in bodies) < max(body["max_tokens"] for body in bodies)
