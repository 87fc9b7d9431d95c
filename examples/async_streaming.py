"""Several requests in one event loop: python examples/async_streaming.py [CHECKPOINT_FOLDER]

Without a folder it runs the small checkpoint of this repository, which knows short tasks and nothing else.
"""

import asyncio
import sys
from pathlib import Path

from deepinfer import AsyncLLM, SamplingParams

TINY = Path(__file__).resolve().parents[1] / "assets" / "deepinfer-tiny"


async def follow(llm: AsyncLLM, name: str, prompt: str) -> None:
    """Print an answer piece by piece."""
    params = SamplingParams(temperature=0.7, max_tokens=24, seed=1)
    async for output in llm.generate(prompt, params, request_id=name, output_kind="delta"):
        if output.error is not None:
            print(f"{name}: {output.error}")
            return
        for choice in output.outputs:
            print(f"{name}: {choice.text!r} {choice.finish_reason or ''}")


async def think_aloud(llm: AsyncLLM) -> None:
    """Print the reasoning and the answer of a conversation as they come."""
    conversation = [{"role": "user", "content": "What is 57 + 602 + 46?"}]
    async for output in llm.chat(conversation, SamplingParams(temperature=0, max_tokens=64), output_kind="delta"):
        for message in output.messages:
            print(f"chat: thought {message.reasoning_content or ''!r}, said {message.content!r}")


async def lose_patience(llm: AsyncLLM) -> None:
    """Leave a generator: its request is aborted, and what it held is free."""
    async for output in llm.generate("And then", SamplingParams(max_tokens=1000), output_kind="delta"):
        print(f"patience: {output.delta!r}, that will do")
        break


async def main(folder: str) -> None:
    """Run all of these at once, on one engine."""
    async with AsyncLLM(folder, max_num_seqs=8, max_model_len=2048) as llm:
        await asyncio.gather(
            follow(llm, "story", "Once upon a time"),
            follow(llm, "empty", ""),
            think_aloud(llm),
            lose_patience(llm),
        )


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(__doc__)
    asyncio.run(main(sys.argv[1] if len(sys.argv) == 2 else str(TINY)))
