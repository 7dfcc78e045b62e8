"""Many prompts at once with a model in this process, without a server.

    python examples/offline_generate.py [MODEL]

Without MODEL it is the demo model.
"""

import sys

from antiphon import LLM, SamplingParams


def main() -> None:
    """Prints the answer to each prompt."""
    prompts = ["What is 12 + 7?", "Name a colour.", "What is the opposite of hot?"]
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "", dtype="float32") as llm:
        conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
        for prompt, output in zip(
            prompts, llm.chat(conversations, SamplingParams(temperature=0, max_tokens=32)), strict=True
        ):
            print(f"{prompt} -> {output.outputs[0].text}")


if __name__ == "__main__":
    main()
