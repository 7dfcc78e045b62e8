"""An answer that is printed while the server generates it."""

import os
import time

from openai import OpenAI

BASE_URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")


def main() -> None:
    """Prints each piece of text as it arrives, then the time to the first one and the token counts."""
    client = OpenAI(base_url=BASE_URL, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    started, first_s = time.perf_counter(), 0.0
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Tell me a story about a dog."}],
        max_tokens=128,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        if chunk.choices and (text := chunk.choices[0].delta.content):
            first_s = first_s or time.perf_counter() - started
            print(text, end="", flush=True)
        if chunk.usage:
            print(f"\n  (first token after {1000 * first_s:.0f} ms, {chunk.usage.completion_tokens} tokens)")


if __name__ == "__main__":
    main()
