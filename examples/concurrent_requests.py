"""Many requests at once: the server computes them in one batch, so they take little longer than one."""

import asyncio
import os
import time

from openai import AsyncOpenAI

BASE_URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
NUM_REQUESTS = 16


async def main() -> None:
    """Sends all requests together and prints each answer and the throughput."""
    async with AsyncOpenAI(base_url=BASE_URL, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
        model = (await client.models.list()).data[0].id

        async def ask(number: int) -> tuple[str, int]:
            completion = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": f"What is {number} + {number}?"}],
                temperature=0,
                max_tokens=32,
            )
            return completion.choices[0].message.content or "", completion.usage.completion_tokens

        started = time.perf_counter()
        answers = await asyncio.gather(*(ask(number) for number in range(NUM_REQUESTS)))
        elapsed_s = time.perf_counter() - started
    for number, (text, _) in enumerate(answers):
        print(f"{number} + {number}: {text}")
    num_tokens = sum(count for _, count in answers)
    print(f"{len(answers)} answers, {num_tokens} tokens in {elapsed_s:.2f} s: {num_tokens / elapsed_s:.0f} tokens/s")


if __name__ == "__main__":
    asyncio.run(main())
