"""`logit_bias`, `allowed_token_ids` and `bad_words` in a request's form and in the engine's."""

from types import SimpleNamespace
from typing import Any

import pytest

from antiphon.shared.errors import ServiceError
from antiphon.shared.request.sampling_fields import TokenConstraints, token_constraints


def test_the_fields_are_converted() -> None:
    fields = SimpleNamespace(logit_bias={"5": 1, "7": -100}, allowed_token_ids=[3, 4], bad_words=[9, "ape"])
    assert token_constraints(fields) == TokenConstraints(((5, 1.0), (7, -100.0)), (3, 4), ((9,),), ("ape",))
    assert token_constraints(SimpleNamespace()) == TokenConstraints()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [1] * 1000}, "bad_words"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ServiceError) as error:
        token_constraints(SimpleNamespace(**fields))
    assert error.value.param == param
