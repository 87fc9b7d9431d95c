"""Questions and answers of a batch side by side: python examples/show_answers.py REQUESTS.jsonl ANSWERS.jsonl"""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def main(requests: Path, answers: Path) -> None:
    """Print a table in the order of the requests."""
    said = {line["custom_id"]: line for line in read(answers)}
    table = Table("request", "asked", "answered", show_lines=True)
    for line in read(requests):
        question = line["body"]["messages"][-1]["content"]
        table.add_row(line["custom_id"], shortened(question), answer(said[line["custom_id"]]))
    Console().print(table)


def read(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def shortened(text: str, length: int = 160) -> str:
    """Both ends of a long text."""
    return text if len(text) <= length else f"{text[: length // 2]} ... {text[-length // 2 :]}"


def answer(line: dict[str, Any]) -> str:
    """What a response says: thinking, text and tool calls; or its error."""
    if line["error"] is not None:
        return f"error: {line['error']['message']}"
    message = line["response"]["body"]["choices"][0]["message"]
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or []]
    thought = message.get("reasoning_content")
    parts = [f"(thinks: {thought})" if thought else "", message.get("content") or "", *calls]
    return "\n".join(part for part in parts if part)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
