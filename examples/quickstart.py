"""The Python side in one page: python examples/quickstart.py [CHECKPOINT_FOLDER]

Without a folder it runs the small checkpoint of this repository, which knows short tasks and nothing else.
"""

import sys
from pathlib import Path

from deepinfer import LLM, SamplingParams

TINY = Path(__file__).resolve().parents[1] / "assets" / "deepinfer-tiny"


def main(folder: str) -> None:
    """Answer conversations, think, continue texts, and watch an answer grow."""
    exact = SamplingParams(temperature=0, max_tokens=64)
    with LLM(folder, max_num_seqs=8) as llm:
        questions = ["What is 348 + 275?", "Sort in ascending order: 812, 47, 305", "请重复：西山城，长白湖，北青桥"]
        conversations = [[{"role": "user", "content": question}] for question in questions]
        for question, answer in zip(questions, llm.chat(conversations, exact, thinking=False), strict=True):
            print(question, "->", answer.content)

        (answer,) = llm.chat([{"role": "user", "content": "What is 57 + 602 + 46?"}], exact, reasoning_effort="low")
        print("thought:", repr(answer.reasoning_content))
        print("answer: ", repr(answer.content), f"({answer.note})" if answer.note else "")

        params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=16, seed=1)
        for result in llm.generate(["The value of a name is", "从前有一座山，"], params):
            print(repr(result.prompt), "->", repr(result.outputs[0].text))

        for piece in llm.stream("An expression is", SamplingParams(temperature=0, max_tokens=16)):
            print(piece.delta, end="", flush=True)
        print()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(__doc__)
    main(sys.argv[1] if len(sys.argv) == 2 else str(TINY))
