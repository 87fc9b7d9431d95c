"""Questions and answers of a batch side by side: python examples/show_answers.py REQUESTS.jsonl ANSWERS.jsonl"""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def main(requests: Path, answers: Path) -> None:
    """Print a table in the order of the requests; those that have no line in the answers yet are shown without."""
    said = {line["custom_id"]: answer(line) for line in read(answers)}
    table = Table("request", "asked", "answered", show_lines=True)
    for line in read(requests):
        name, question = line["custom_id"], line["body"]["messages"][-1]["content"]
        # as text, since square brackets in a string would be markup
        table.add_row(*map(Text, (name, shortened(question), said.get(name, "(no answer yet)"))))
    Console().print(table)


def read(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; a line that is none, such as one half written, is named and left out."""
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        try:
            found += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            print(f"{file}, line {number}: left out, no JSON: {error}", file=sys.stderr)
    return found


def shortened(text: str, length: int = 160) -> str:
    """Both ends of a long text."""
    return text if len(text) <= length else f"{text[: length // 2]} ... {text[-length // 2 :]}"


def answer(line: dict[str, Any]) -> str:
    """What a response says: thinking, text and tool calls; or its error."""
    body = (line["response"] or {}).get("body", {})
    error = line["error"] or body.get("error")
    if error:
        return f"error: {error['message']}"
    message = body["choices"][0]["message"]
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or []]
    thought = message.get("reasoning_content")
    parts = [f"(thinks: {thought})" if thought else "", message.get("content") or "", *calls]
    return "\n".join(part for part in parts if part)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except OSError as error:
        sys.exit(f"error: {error}")
