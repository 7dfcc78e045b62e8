"""The counting of `make walk`, and the page that has its figures. Real processes are recorded in tests/system."""

from infra.walk import page
from infra.walk.figures import GATEWAY, UNTIL_SUBMIT, WHOLE, Figures, Step, figures, walk, walks
from infra.walk.hook import ENTERED, RESUMED, SENT

A, B, C = ("a.py", "a"), ("b.py", "b"), ("b.py", "c")
TIMER = ("t.py", "t")


def test_the_page_has_the_committed_figures() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.BEGIN in text
    assert page.rendered(text, page.committed()) == text, "run `make walk ARGS=--write`"


def test_each_visit_in_another_file_is_a_hand_over_and_a_return_if_the_file_was_visited() -> None:
    found = walk([Step(ENTERED, one) for one in (A, B, C, A, A)], {A, B, C})
    assert (found.functions, found.hand_overs, found.returns) == ((A, B, C), 2, 1)


def test_a_coroutine_that_is_resumed_is_no_hand_over_unless_it_was_not_visited() -> None:
    assert walk([Step(ENTERED, A), Step(ENTERED, B), Step(RESUMED, A), Step(ENTERED, A)], {A, B}).hand_overs == 1
    assert walk([Step(ENTERED, A), Step(RESUMED, B)], {A, B}).hand_overs == 1


def test_what_an_idle_server_or_few_requests_run_does_not_count() -> None:
    ran = ((A, B), (B, A), (A, B, C), (A, TIMER, B))
    requests = [{GATEWAY: [Step(ENTERED, one) for one in functions]} for functions in ran]
    assert walks({GATEWAY: [Step(ENTERED, A)]}, requests)[GATEWAY].functions == (B,)


def test_the_part_until_submit_ends_where_the_message_leaves() -> None:
    steps = [Step(ENTERED, A), Step(ENTERED, B), Step(SENT, B), Step(ENTERED, C), Step(SENT, B)]
    found = figures(walks({}, [{GATEWAY: steps, "engine": [Step(ENTERED, A)]}] * 2))
    assert found[UNTIL_SUBMIT] == Figures(files=2, functions=2, hand_overs=1, returns=0)
    assert found[GATEWAY] == Figures(files=2, functions=3, hand_overs=1, returns=0)
    assert found[WHOLE].functions == 3
