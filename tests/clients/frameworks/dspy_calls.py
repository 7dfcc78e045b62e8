"""DSPy with a server like OpenAI's."""

from typing import Literal

import dspy

from tests.clients.checks import ANSWER, ASK, KEY, MODEL, URL, Answer, check

SETTINGS = {"api_base": URL, "api_key": KEY, "temperature": 0, "max_tokens": 240, "cache": False, "num_retries": 0}
lm = dspy.LM(f"openai/{MODEL}", **SETTINGS)


class Judge(dspy.Signature):
    """Says how the text is meant."""

    text: str = dspy.InputField()
    mood: Literal["good", "bad"] = dspy.OutputField()


@check
def a_model_answers():
    assert lm(ASK) == [ANSWER]


@check
def responses_are_made():
    assert dspy.LM(f"openai/{MODEL}", model_type="responses", **SETTINGS)(ASK)


@check
def a_signature_is_filled():
    # DSPy itself asks for a schema only if it knows the model by name.
    schema = {"name": "answer", "strict": True, "schema": Answer.model_json_schema()}
    form = {"type": "json_schema", "json_schema": schema}
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Judge, response_format=form)(text=ASK).mood in ("good", "bad")


@check
def texts_are_embedded():
    made = dspy.Embedder(f"openai/{MODEL}", api_base=URL, api_key=KEY, caching=False)
    assert made(["one", "two"]).shape[0] == 2
