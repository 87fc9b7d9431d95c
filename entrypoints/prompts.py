"""Prompts in every shape people write them, and answers as messages.

Owns the way from text, token ids and conversations to what the engine takes, and back from generated ids to reasoning,
content and calls. How a conversation is spelled is the model's business (`models/*/chat.py`); limits are the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any

from deepinfer.core.answer_text import text_with
from deepinfer.core.errors import RequestError
from deepinfer.core.grammar.spec import StructuredOutput
from deepinfer.core.outputs import CompletionOutput, RequestOutput
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.entrypoints.answer_form import read_form, told_request
from deepinfer.entrypoints.answer_stream import AnswerStream
from deepinfer.entrypoints.chat_protocol import ChatFormat
from deepinfer.ops.show import shown

PromptLike = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; a dict may also hold a `cache_salt`."""

_DICT_KEYS = ("prompt", "prompt_token_ids")
_DICT_OPTIONS = ("cache_salt",)


@dataclass(frozen=True)
class PreparedPrompt:
    """What the engine takes, and what is needed to read the answer.

    Attributes:
        token_ids: the prompt.
        text: the prompt as text, if it came as text or as a conversation.
        is_chat: whether the answer is a message.
        starts_in_reasoning: whether the answer begins inside the reasoning.
        tools: the conversation's tools.
        cache_salt: only requests of equal salt share KV; None for the caller's.
        structured_output: the form that the conversation asks of the answer; None for any.
    """

    token_ids: list[int]
    text: str | None = None
    is_chat: bool = False
    starts_in_reasoning: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    cache_salt: str | None = None
    structured_output: StructuredOutput | None = None

    def constrain(self, params: SamplingParams) -> SamplingParams:
        """`params`, with the form that the conversation asks for.

        Raises:
            RequestError: they ask for one as well.
        """
        if self.structured_output is None:
            return params
        if params.structured_output is not None:
            raise RequestError(
                "invalid_parameter",
                "structured_output cannot be combined with a response_format or tool_choice that has a form of its own",
            )
        return replace(params, structured_output=self.structured_output)


@dataclass(frozen=True)
class ToolCall:
    """A tool's name and its arguments as the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ChatMessage:
    """An answer taken apart.

    Attributes:
        content: the answer itself, "" if there is none.
        reasoning_content: the reasoning; None when thinking was off.
        tool_calls: complete calls, in order.
        num_reasoning_tokens: generated tokens up to the end of the reasoning.
        note: what a reader should know, such as that the reasoning used up all tokens; None if nothing.
    """

    content: str = ""
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    num_reasoning_tokens: int = 0
    note: str | None = None


@dataclass
class ChatOutput(RequestOutput):
    """The result of a conversation: `messages[i]` is what `outputs[i]` says."""

    messages: list[ChatMessage] = field(default_factory=list)

    @property
    def content(self) -> str:
        """The first choice's answer, "" if there is none."""
        return self.messages[0].content if self.messages else ""

    @property
    def reasoning_content(self) -> str | None:
        """The first choice's reasoning."""
        return self.messages[0].reasoning_content if self.messages else None

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The first choice's calls."""
        return self.messages[0].tool_calls if self.messages else ()

    @property
    def note(self) -> str | None:
        """The first choice's note."""
        return self.messages[0].note if self.messages else None


class PromptReader:
    """Turns what callers write into token ids, and generated ids into messages.

    Args:
        tokenizer: None for a model without text; then only token ids are taken.
        chat: the model's chat format; None for a model without one.
    """

    def __init__(self, tokenizer: Tokenizer | None, chat: ChatFormat | None) -> None:
        self.tokenizer = tokenizer
        self._chat = chat
        self._visible: frozenset[int] = frozenset()
        if tokenizer is not None and chat is not None:
            ids = (tokenizer.token_to_id(token) for token in chat.visible_tokens)
            self._visible = frozenset(i for i in ids if i is not None)

    def read(self, prompt: object) -> PreparedPrompt:
        """Read one prompt.

        Text begins with the beginning-of-sentence token; ids are taken as they are. Control tokens spelled in a text
        stay ordinary text.

        Raises:
            RequestError: the prompt is empty, of an unknown shape, or is text and there is no tokenizer.
        """
        salt = None
        if isinstance(prompt, Mapping):
            salt = prompt.get("cache_salt")
            keys = [key for key in _DICT_KEYS if prompt.get(key) is not None]
            unknown = [str(key) for key in prompt if key not in _DICT_KEYS + _DICT_OPTIONS]
            if len(keys) != 1 or unknown:
                raise _invalid(f"a dict needs exactly one of {', '.join(_DICT_KEYS)}, got {shown(list(prompt))}")
            prompt = prompt[keys[0]]
            if isinstance(prompt, str) != (keys[0] == "prompt"):
                raise _invalid(f"{keys[0]} must be {'text' if keys[0] == 'prompt' else 'a list of token ids'}")
        read = self._read_text(prompt) if isinstance(prompt, str) else PreparedPrompt(_read_ids(prompt))
        return read if salt is None else replace(read, cache_salt=salt)

    def read_chat(
        self,
        request: Mapping[str, Any],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> PreparedPrompt:
        """Render a conversation (`messages`, and optionally `tools`, `thinking`, `reasoning_effort`, ...).

        `response_format`, `tool_choice` and strict tools also give the prompt's `structured_output`.

        Raises:
            RequestError: the conversation cannot be rendered; the message begins with the place at fault.
        """
        if self._chat is None or self.tokenizer is None:
            raise RequestError("chat_unavailable", "this model has no chat format; send prompts or token ids")
        told = told_request(request)
        try:
            rendered = self._chat.encode_chat(
                told,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            ids = rendered.to_ids(self.tokenizer)
        except ValueError as error:
            raise RequestError("invalid_chat", str(error)) from error
        if rendered.num_images:
            raise RequestError("unsupported_parameter", "messages: images are not supported yet; send text parts only")
        return PreparedPrompt(
            ids,
            rendered.text,
            True,
            rendered.starts_in_reasoning,
            told.get("tools"),
            structured_output=read_form(request, is_chat=True),
        )

    def read_messages(
        self,
        messages: object,
        *,
        thinking: bool | Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **options: Any,
    ) -> PreparedPrompt:
        """Render a conversation, its options as `LLM.chat` takes them.

        Raises:
            RequestError: the conversation cannot be rendered; the message begins with the place at fault.
        """
        if isinstance(thinking, bool):
            thinking = {"type": "enabled" if thinking else "disabled"}
        return self.read_chat(
            {"messages": messages, "thinking": thinking, **options},
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def read_answer(self, prompt: PreparedPrompt, completion: CompletionOutput) -> ChatMessage:
        """Take a finished answer apart."""
        assert self._chat is not None and self.tokenizer is not None, "only a chat prompt has an answer to read"
        text = text_with(self.tokenizer, completion, self._visible)
        parsed = self._chat.parse_completion(text, prompt.starts_in_reasoning, tools=prompt.tools)
        num_reasoning = self._num_reasoning_tokens(prompt, completion.token_ids, parsed.reasoning_truncated)
        note = None
        if parsed.reasoning_truncated and completion.finish_reason == "length":
            note = (
                f"the reasoning used all {len(completion.token_ids)} tokens, so there is no answer; raise max_tokens, "
                'lower reasoning_effort, or set thinking to {"type": "disabled"}'
            )
        elif parsed.reasoning_truncated and completion.finish_reason == "stop":
            ended = "the model ended" if completion.stop_reason is None else f"{completion.stop_reason!r} stopped it"
            note = f"{ended} inside its reasoning, so there is no answer"
        return ChatMessage(
            content=parsed.content,
            reasoning_content=parsed.reasoning_content,
            tool_calls=tuple(ToolCall(call.name, call.arguments) for call in parsed.tool_calls),
            num_reasoning_tokens=num_reasoning,
            note=note,
        )

    def follow_answer(self, prompt: PreparedPrompt, params: SamplingParams) -> AnswerStream:
        """Take an answer apart as it arrives."""
        assert self._chat is not None and self.tokenizer is not None, "only a chat prompt has an answer to read"
        parser = self._chat.new_parser(prompt.starts_in_reasoning, tools=prompt.tools)
        return AnswerStream(self.tokenizer, parser, self._visible, params)

    def chat_output(self, prompt: PreparedPrompt, output: RequestOutput) -> ChatOutput:
        """`output` with its answers taken apart."""
        values = {f.name: getattr(output, f.name) for f in fields(RequestOutput)}
        messages = [] if output.error else [self.read_answer(prompt, choice) for choice in output.outputs]
        return ChatOutput(**values, messages=messages)

    def _read_text(self, text: str) -> PreparedPrompt:
        if self.tokenizer is None:
            raise RequestError("no_tokenizer", "the model has no tokenizer; send token ids")
        if not text:
            raise RequestError("empty_prompt", "the prompt is empty; send at least one character")
        return PreparedPrompt([self.tokenizer.bos_token_id, *self.tokenizer.encode(text)], text)

    def _num_reasoning_tokens(self, prompt: PreparedPrompt, token_ids: list[int], is_truncated: bool) -> int:
        """Tokens before the answer; the first visible control token ends the reasoning, `</think>` belongs to it."""
        assert self._chat is not None and self.tokenizer is not None
        if not prompt.starts_in_reasoning:
            return 0
        if is_truncated:
            return len(token_ids)
        end_think = {self.tokenizer.token_to_id(token) for token in self._chat.visible_tokens if token == "</think>"}
        for place, token_id in enumerate(token_ids):
            if token_id in self._visible:
                return place + (token_id in end_think)
        return len(token_ids)


def is_token_ids(value: object) -> bool:
    """Whether `value` is one prompt of token ids, not a list of prompts. An empty list is no prompt."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return isinstance(value, list | tuple) and bool(value) and all(_is_int(item) for item in value)


def _read_ids(prompt: object) -> list[int]:
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise _invalid(f"expected text, a list of token ids or a dict, got {type(prompt).__name__}")
    if not ids:
        raise RequestError("empty_prompt", "the prompt is empty; send at least one token id")
    for place, token_id in enumerate(ids):
        if not _is_int(token_id):
            raise _invalid(f"token id {place} must be an integer, got {shown(token_id)}")
    return [int(token_id) for token_id in ids]


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _invalid(message: str) -> RequestError:
    return RequestError("invalid_prompt", message)
