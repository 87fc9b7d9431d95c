"""Results as they grow: snapshots of a running request, and pieces of one that are put together."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from deepinfer.core.outputs import CompletionOutput, RequestOutput


@dataclass
class StreamOutput(RequestOutput):
    """A running request at one moment; later steps do not change it.

    Attributes:
        prompt_index: which of the prompts it answers.
        delta: text of the first choice that is new since the output before.
    """

    prompt_index: int = 0
    delta: str = ""


def snapshot(output: RequestOutput, prompt_index: int, delta: str) -> StreamOutput:
    """A result as it is now."""
    now = with_choices(output, [copied(choice) for choice in output.outputs])
    if output.prompt_logprobs is not None:
        now.prompt_logprobs = list(output.prompt_logprobs)
    now.prompt_index, now.delta = prompt_index, delta
    return now


def with_choices(output: RequestOutput, choices: list[CompletionOutput]) -> StreamOutput:
    """A result as it is now, but for its choices."""
    now = StreamOutput(output.request_id)
    _assign(now, output, _RESULT_FIELDS)
    now.outputs = choices
    now.timings = replace(output.timings)
    return now


def extend(whole: RequestOutput, news: RequestOutput) -> None:
    """Add a later piece of a result to an earlier one, or to all pieces before it."""
    by_index = {choice.index: choice for choice in whole.outputs}
    for choice in news.outputs:
        before = by_index.get(choice.index)
        if before is None:
            whole.outputs.append(copied(choice))
            continue
        before.token_ids.extend(choice.token_ids)
        if before.logprobs is not None and choice.logprobs is not None:
            before.logprobs.extend(choice.logprobs)
        before.text += choice.text
        _assign(before, choice, _CHOICE_FIELDS)
    if len(whole.outputs) > len(by_index):
        whole.outputs.sort(key=lambda choice: choice.index)
    scores = whole.prompt_logprobs
    _assign(whole, news, _RESULT_FIELDS)
    if news.prompt_logprobs is None:
        whole.prompt_logprobs = scores  # they come once
    whole.timings = news.timings


def copied(choice: CompletionOutput) -> CompletionOutput:
    """A choice that later tokens of the original do not change."""
    return part_of(choice, 0, 0)


def part_of(choice: CompletionOutput, first_token: int, first_char: int) -> CompletionOutput:
    """A choice from a token and a character of its text on."""
    part = CompletionOutput(choice.index, choice.text[first_char:], choice.token_ids[first_token:])
    _assign(part, choice, _CHOICE_FIELDS)
    part.logprobs = None if choice.logprobs is None else choice.logprobs[first_token:]
    return part


_RESULT_FIELDS = tuple(field.name for field in fields(RequestOutput) if field.name not in ("outputs", "timings"))
_CHOICE_FIELDS = tuple(
    field.name for field in fields(CompletionOutput) if field.name not in ("index", "text", "token_ids", "logprobs")
)
"""What does not grow piece by piece, but is as it is."""


def _assign(target: object, source: object, names: tuple[str, ...]) -> None:
    for name in names:
        setattr(target, name, getattr(source, name))
