"""A response that runs in the background: its stream is dropped in the middle and continued from there."""

import os

from openai import OpenAI

BASE_URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
SEEN_BEFORE_THE_DROP = 8


def main() -> None:
    """Prints the text of both parts of the stream, then the whole text as the server has stored it."""
    client = OpenAI(base_url=BASE_URL, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    response = client.responses.create(
        model=model, input="Tell me a story.", max_output_tokens=64, temperature=0, background=True
    )
    last = -1
    with client.responses.retrieve(response.id, stream=True) as stream:
        for event in stream:
            show(event)
            last = event.sequence_number
            if last == SEEN_BEFORE_THE_DROP:
                break
    print("|", end="")
    for event in client.responses.retrieve(response.id, stream=True, starting_after=last):
        show(event)
    stored = client.responses.retrieve(response.id)
    print(f"\n{stored.output_text}")


def show(event) -> None:
    """Prints the text of an event, if it has some."""
    if event.type == "response.output_text.delta":
        print(event.delta, end="", flush=True)


if __name__ == "__main__":
    main()
