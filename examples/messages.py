"""A streamed message with the Anthropic client."""

import os

from anthropic import Anthropic

BASE_URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1").removesuffix("/v1")


def main() -> None:
    """Prints the answer as it comes, then why it ended and its token counts."""
    client = Anthropic(base_url=BASE_URL, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    question = {"role": "user", "content": "What is 12 + 7?"}
    with client.messages.stream(model=model, messages=[question], max_tokens=64) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
        message = stream.get_final_message()
    usage = message.usage
    print(f"\n  ({message.stop_reason}; {usage.input_tokens} input tokens, {usage.output_tokens} output tokens)")


if __name__ == "__main__":
    main()
