"""Instructor: each of its ways to have a server of OpenAI's or Anthropic's API fill in a form."""

import instructor
from anthropic import Anthropic
from instructor import Mode
from instructor.core.exceptions import IncompleteOutputException
from openai import AsyncOpenAI, OpenAI

from tests.clients.checks import HOST, KEY, MODEL, QUESTION, URL, Answer, check, raised

openai = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
ASKED = {"model": MODEL, "messages": QUESTION, "response_model": Answer, "max_retries": 1}


def fills(mode: Mode) -> None:
    found = instructor.from_openai(openai, mode=mode).chat.completions.create(**ASKED, temperature=0)
    assert isinstance(found, Answer)


@check
def tools_fill_a_form():
    fills(Mode.TOOLS)


@check
def strict_tools_fill_a_form():
    fills(Mode.TOOLS_STRICT)


@check
def a_json_schema_fills_a_form():
    fills(Mode.JSON_SCHEMA)


@check
def json_is_written():
    client = instructor.from_openai(openai, mode=Mode.JSON)
    # Only the prompt tells the model which fields are wanted, and the demo model does not follow it.
    cut = raised(IncompleteOutputException, lambda: client.chat.completions.create(**ASKED, max_tokens=20))
    assert cut.last_completion.choices[0].message.content.startswith("{")


@check
def tools_of_responses_fill_a_form():
    fills(Mode.RESPONSES_TOOLS)


@check
def tools_of_responses_beside_the_servers_fill_a_form():
    fills(Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS)


@check
def anthropics_tools_fill_a_form():
    client = instructor.from_anthropic(Anthropic(base_url=HOST, api_key=KEY, max_retries=0), mode=Mode.ANTHROPIC_TOOLS)
    assert isinstance(client.messages.create(**ASKED, max_tokens=240), Answer)


@check
def a_form_is_filled_while_it_streams():
    client = instructor.from_openai(openai, mode=Mode.TOOLS)
    *_, last = client.chat.completions.create_partial(**ASKED, temperature=0)
    Answer.model_validate(last.model_dump())


@check
async def the_asynchronous_client_fills_a_form():
    client = instructor.from_openai(AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0), mode=Mode.TOOLS)
    assert isinstance(await client.chat.completions.create(**ASKED, temperature=0), Answer)
