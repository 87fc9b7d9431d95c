"""The outputs of a conversation as its answers grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from deepinfer.core.outputs import CompletionOutput, RequestOutput
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.entrypoints.answer_stream import AnswerStream
from deepinfer.entrypoints.chat_protocol import FunctionCall
from deepinfer.entrypoints.prompts import ChatMessage, ChatOutput, PreparedPrompt, PromptReader, ToolCall
from deepinfer.entrypoints.stream_output import extend, snapshot


class ChatStream:
    """Follows all choices of one request.

    Args:
        reader: knows the chat format.
        prompt: the conversation, as it was read.
        params: the request's.
        only_new: messages hold what is new, else all so far.
    """

    def __init__(self, reader: PromptReader, prompt: PreparedPrompt, params: SamplingParams, only_new: bool) -> None:
        self._reader = reader
        self._prompt = prompt
        self._params = params
        self._only_new = only_new
        self._whole: RequestOutput | None = None
        self._answers: dict[int, AnswerStream] = {}
        self._messages: dict[int, ChatMessage] = {}

    def feed(self, news: RequestOutput) -> ChatOutput:
        """Take the next piece of the result, and give the next output."""
        if self._whole is None:
            self._whole = snapshot(news, 0, "")
        else:
            extend(self._whole, news)
        so_far = {choice.index: choice for choice in self._whole.outputs}
        for choice in news.outputs:
            self._messages[choice.index] = self._read(choice, so_far[choice.index])
        output = snapshot(news if self._only_new else self._whole, 0, "")
        values = {field.name: getattr(output, field.name) for field in fields(RequestOutput)}
        # As in `LLM.chat`, what an error cut short is not taken for an answer.
        messages = [] if output.error else [self._messages[choice.index] for choice in output.outputs]
        return ChatOutput(**values, messages=messages)

    def _read(self, news: CompletionOutput, so_far: CompletionOutput) -> ChatMessage:
        if news.index not in self._answers:
            self._answers[news.index] = self._reader.follow_answer(self._prompt, self._params)
        answer = self._answers[news.index]
        new = answer.feed(news)
        if news.finish_reason is not None:
            message = self._reader.read_answer(self._prompt, so_far)
        else:
            parsed = answer.message()
            message = ChatMessage(parsed.content, parsed.reasoning_content, _calls(parsed.tool_calls))
        if not self._only_new:
            return message
        return replace(
            message,
            content=new.content,
            reasoning_content=new.reasoning_content or None,
            tool_calls=_calls(new.tool_calls),
        )


def _calls(calls: Sequence[FunctionCall]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(call.name, call.arguments) for call in calls)
