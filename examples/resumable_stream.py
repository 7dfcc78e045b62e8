"""An answer that goes on when the connection breaks or the server's gateway dies, without any library but Antiphon."""

import os
import sys

from antiphon.client import stream

BASE_URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
QUESTION = "What is 12 + 7?"


def main() -> None:
    """Prints the answer as it arrives."""
    body = {"messages": [{"role": "user", "content": sys.argv[1] if len(sys.argv) > 1 else QUESTION}], "max_tokens": 64}
    for chunk in stream(f"{BASE_URL}/chat/completions", body, api_key=os.environ.get("OPENAI_API_KEY", "")):
        for choice in chunk["choices"]:
            print(choice["delta"].get("content", ""), end="", flush=True)
    print()


if __name__ == "__main__":
    main()
