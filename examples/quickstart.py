"""The Python side in one page: python examples/quickstart.py CHECKPOINT_FOLDER

`deepinfer make-tiny DIR` writes a small random checkpoint to try it with; what that one says is noise.
"""

import sys

from deepinfer import LLM, SamplingParams


def main(folder: str) -> None:
    """Continue texts, answer a conversation, and watch an answer grow."""
    with LLM(folder, max_num_seqs=8) as llm:
        params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=32, seed=1)
        for result in llm.generate(["Once upon a time", "从前有一座山，"], params):
            print(repr(result.prompt), "->", repr(result.outputs[0].text))

        conversation = [{"role": "user", "content": "What is the capital of France?"}]
        (answer,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=64), reasoning_effort="low")
        print("thought:", repr(answer.reasoning_content))
        print("answer: ", repr(answer.content), f"({answer.note})" if answer.note else "")

        for piece in llm.stream("The sea is", SamplingParams(temperature=0, max_tokens=16)):
            print(piece.delta, end="", flush=True)
        print()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
