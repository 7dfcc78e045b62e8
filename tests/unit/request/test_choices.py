from antiphon.shared.request.choices import best_first


def test_the_highest_log_probabilities_come_first_and_equal_ones_keep_their_order() -> None:
    assert best_first([-3.0, -1.0, -2.0, -1.0], 3) == [1, 3, 2]
    assert best_first([-1.0], 1) == [0]
