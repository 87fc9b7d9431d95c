"""OpenAI's batch format: lines of requests to prompts and parameters, results to lines.

What a body may hold is listed here once. A parameter that is known but has no effect here yet is refused by name unless
its value asks for nothing, so that nobody gets an answer to another question than the one asked.
"""

from __future__ import annotations

import difflib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepinfer.core.detokenizer import IncrementalDetokenizer
from deepinfer.core.errors import RequestError
from deepinfer.core.outputs import CompletionOutput, Logprob, RequestOutput
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.entrypoints.answer_form import FORM_FIELDS, read_form
from deepinfer.entrypoints.prompts import ChatMessage, PreparedPrompt, PromptReader
from deepinfer.ops.show import shown

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
KEYED_BY_LINE = frozenset({"invalid_json", "missing_custom_id", "duplicate_custom_id"})
"""Codes of errors whose item is known by its line in the input, for want of an id of its own."""

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions
_MAX_LOGPROBS = 20
_MIN_LOGPROB = -9999.0  # JSON has no infinity

_ANY: type = object
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "ignore_eos", "min_tokens", "skip_special_tokens"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "allowed_token_ids", "bad_words", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("golden_token_ids", "thinking_budget", "logits_processors"),
    *("logprobs_mode", "logprob_token_ids"),
)
"""Passed on as they are: `SamplingParams` checks them, and the engine refuses by name what cannot be combined."""

_CHAT_FIELDS = (
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "thinking", "reasoning_effort", "response_format"),
    *FORM_FIELDS,
)
"""Passed on to the chat format, which checks them and says where in the conversation a fault is."""

_COMMON: dict[str, type] = {
    **dict.fromkeys(_SAMPLING, _ANY),
    "model": str,
    "user": str,
    "metadata": dict,
    "max_tokens": _ANY,
    "cache_salt": str,
    "prompt_logprobs": int,
}
_CHAT: dict[str, type] = {
    **_COMMON,
    **dict.fromkeys(_CHAT_FIELDS, _ANY),
    "max_completion_tokens": _ANY,
    "logprobs": bool,
    "top_logprobs": int,
}
_COMPLETION: dict[str, type] = {
    **_COMMON,
    **dict.fromkeys(FORM_FIELDS, _ANY),
    "prompt": _ANY,
    "logprobs": int,
    "response_format": _ANY,
}

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "stream": (False,),
    "stream_options": ({},),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("auto",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
"""Parameters that have no effect here yet, each with the values that ask for none."""


@dataclass(frozen=True)
class BatchItem:
    """One request of a batch.

    Attributes:
        line: where it stands in the input, from 1.
        custom_id: its name.
        url: which of the two kinds it is.
        body: the request itself.
    """

    line: int
    custom_id: str
    url: str
    body: Mapping[str, Any]

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return self.url == CHAT_URL


def parse_line(line: int, data: bytes) -> tuple[str | None, BatchItem | RequestError]:
    """Read one line of the input.

    Returns:
        Its `custom_id`, None if it has no usable one, and the item or why it is none.
    """
    try:
        value = json.loads(data.decode("utf-8-sig" if line == 1 else "utf-8"))
    except (ValueError, RecursionError) as error:
        return None, RequestError("invalid_json", f"the line is not valid JSON: {error}")
    if not isinstance(value, dict):
        return None, RequestError("invalid_json", f"the line must be a JSON object, got {_kind(value)}")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        got = "none" if custom_id is None else shown(custom_id)
        return None, RequestError("missing_custom_id", f"custom_id must be a non-empty string, got {got}")
    method, url, body = value.get("method", "POST"), value.get("url"), value.get("body")
    if method != "POST":
        return custom_id, RequestError("invalid_method", f"method must be 'POST', got {shown(method)}")
    if url not in (CHAT_URL, COMPLETIONS_URL):
        return custom_id, RequestError("unknown_url", f"url must be {CHAT_URL} or {COMPLETIONS_URL}, got {shown(url)}")
    if not isinstance(body, dict):
        return custom_id, RequestError("invalid_body", f"body must be a JSON object, got {_kind(body)}")
    return custom_id, BatchItem(line, custom_id, url, body)


def prepare(
    item: BatchItem, reader: PromptReader, *, max_len: int, default_max_tokens: int | None = None
) -> tuple[PreparedPrompt, SamplingParams]:
    """Turn an item into what the engine takes.

    Args:
        item: the request.
        reader: renders and tokenises.
        max_len: the longest prompt and answer together.
        default_max_tokens: where the request does not say; None for OpenAI's rule: a chat goes on as long as there is
            room, a completion for 16 tokens.

    Raises:
        RequestError: a parameter is unknown, not supported yet or wrong; it is named.
    """
    body = {name: value for name, value in item.body.items() if value is not None}
    known = _CHAT if item.is_chat else _COMPLETION
    _check_names(body, known)
    for name in sorted(body.keys() & known.keys()):
        _check_type(name, body[name], known[name])
    if item.is_chat:
        prompt = reader.read_chat({name: body.get(name) for name in _CHAT_FIELDS})
    else:
        prompt = _read_completion_prompt(body, reader)
        prompt = replace(prompt, structured_output=read_form(body, is_chat=False))
    max_tokens = body.get("max_completion_tokens", body.get("max_tokens", default_max_tokens))
    if max_tokens is None:
        max_tokens = max_len if item.is_chat else _DEFAULT_COMPLETION_TOKENS
    _check_count("prompt_logprobs", body.get("prompt_logprobs"))
    options = {name: body[name] for name in (*_SAMPLING, "prompt_logprobs") if name in body}
    prompt = replace(prompt, cache_salt=body.get("cache_salt"))
    return prompt, SamplingParams(max_tokens=max_tokens, logprobs=_logprobs(item, body), **options)


def response_record(
    item: BatchItem, prompt: PreparedPrompt, output: RequestOutput, reader: PromptReader, default_model: str
) -> dict[str, Any]:
    """The output line of an answered item."""
    model = item.body.get("model") or Path(default_model).name
    choices, num_reasoning = [], 0
    note: str | None = None
    for choice in output.outputs:
        entry: dict[str, Any] = {"index": choice.index}
        if item.is_chat:
            message = reader.read_answer(prompt, choice)
            num_reasoning += message.num_reasoning_tokens
            note = note or message.note
            entry["message"] = _message(message, item)
            entry["logprobs"] = _chat_logprobs(choice, item, reader.tokenizer)
            calls_end_it = bool(message.tool_calls) and choice.finish_reason == "stop"
            entry["finish_reason"] = "tool_calls" if calls_end_it else choice.finish_reason
        else:
            entry["text"] = choice.text
            entry["logprobs"] = _completion_logprobs(choice, reader.tokenizer)
            entry["finish_reason"] = choice.finish_reason
        entry["stop_reason"] = choice.stop_reason
        choices.append(entry)
    num_prompt = len(output.prompt_token_ids)
    num_completion = sum(len(choice.token_ids) for choice in output.outputs)
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if item.is_chat else 'cmpl'}-{item.line}",
        "object": "chat.completion" if item.is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens or 0},
        },
        "seed": output.seed,
        "approximate": output.approximate,
    }
    if output.prompt_logprobs is not None:
        body["prompt_logprobs"] = [_prompt_logprobs(entries) for entries in output.prompt_logprobs]
    if item.is_chat:
        body["usage"]["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    if note is not None:
        body["note"] = note
    return {
        "id": f"batch_req_{item.line}",
        "custom_id": item.custom_id,
        "response": {"status_code": 200, "request_id": f"req_{item.line}", "body": body},
        "error": None,
    }


def error_record(line: int, custom_id: str | None, error: RequestError) -> dict[str, Any]:
    """The output line of an item that has no answer."""
    return {
        "id": f"batch_req_{line}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": error.code, "message": error.message, "line": line},
    }


def record_key(record: object) -> str | int | None:
    """Which item an output line belongs to: its id, or its line number if it has none; None if it is no such line."""
    if not isinstance(record, dict):
        return None
    error, custom_id = record.get("error"), record.get("custom_id")
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(error, dict) and isinstance(code, str) and code in KEYED_BY_LINE:
        line = error.get("line")
        return line if isinstance(line, int) else None
    return custom_id if isinstance(custom_id, str) else None


def begins_like_a_record(data: bytes) -> bool:
    """Whether `data` is the beginning of an output line, as a writer that was killed leaves it."""
    if len(data) <= len(_HEAD):
        return _HEAD.startswith(data)
    if not data.startswith(_HEAD):
        return False
    rest = data[len(_HEAD) :].lstrip(b"0123456789")
    return _BEHIND_LINE.startswith(rest[: len(_BEHIND_LINE)])


def dump_line(record: Mapping[str, Any]) -> bytes:
    """A record as one line of JSON. Nothing in it is a line break to any reader, and every string is valid UTF-8."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode() + b"\n"


_HEAD, _BEHIND_LINE = b'{"id": "batch_req_', b'", "custom_id": '  # as `json.dumps` spaces them
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def _check_names(body: Mapping[str, Any], known: Mapping[str, object]) -> None:
    for name, value in body.items():
        if name in known:
            continue
        if name not in _NEUTRAL:
            matches = difflib.get_close_matches(name, [*known, *_NEUTRAL], n=1)
            hint = f"; did you mean {matches[0]!r}?" if matches else ""
            raise RequestError("unknown_parameter", f"body has an unknown parameter {shown(name)}{hint}")
        if not any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in _NEUTRAL[name]
        ):
            raise RequestError("unsupported_parameter", f"{name} is not supported yet; leave it out")


def _check_type(name: str, value: object, wanted: type) -> None:
    fits = wanted is object or (isinstance(value, wanted) and (not isinstance(value, bool) or wanted is bool))
    if not fits:
        raise RequestError("invalid_parameter", f"{name} must be {_KINDS[wanted]}, got {shown(value)}")


def _read_completion_prompt(body: Mapping[str, Any], reader: PromptReader) -> PreparedPrompt:
    prompt = body.get("prompt")
    if prompt is None:
        raise RequestError("invalid_parameter", "body has no prompt; give text or a list of token ids")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        raise RequestError("unsupported_parameter", "prompt: several prompts in one request; give each its own line")
    return reader.read(prompt)


def _logprobs(item: BatchItem, body: Mapping[str, Any]) -> int | None:
    """How many of the best logprobs to record beside the sampled token's; None for none at all."""
    if not item.is_chat:
        name, count = "logprobs", body.get("logprobs")
    elif not body.get("logprobs"):
        if body.get("top_logprobs"):
            raise RequestError("invalid_parameter", "top_logprobs needs logprobs to be true")
        return None
    else:
        name, count = "top_logprobs", body.get("top_logprobs", 0)
    _check_count(name, count)
    return count


def _check_count(name: str, count: int | None) -> None:
    if count is not None and not 0 <= count <= _MAX_LOGPROBS:
        raise RequestError("invalid_parameter", f"{name} must be from 0 to {_MAX_LOGPROBS}, got {shown(count)}")


def _message(message: ChatMessage, item: BatchItem) -> dict[str, Any]:
    result: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning_content is not None:
        result["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        result["content"] = message.content or None
        result["tool_calls"] = [
            {
                "id": f"call_{item.line}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return result


def _chat_logprobs(choice: CompletionOutput, item: BatchItem, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    if choice.logprobs is None or tokenizer is None:
        return None
    count = item.body.get("top_logprobs") or 0
    asked = set(item.body.get("logprob_token_ids") or ())

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        data = tokenizer.id_to_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": _finite(logprob.logprob), "bytes": list(data)}

    content = []
    for token_id, entries in zip(choice.token_ids, choice.logprobs, strict=True):
        by_rank = sorted(entries.items(), key=lambda pair: pair[1].rank)
        shown_too = [entry(*pair) for pair in by_rank if pair[1].rank <= count or pair[0] in asked]
        content.append({**entry(token_id, entries[token_id]), "top_logprobs": shown_too})
    return {"content": content}


def _completion_logprobs(choice: CompletionOutput, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    if choice.logprobs is None or tokenizer is None:
        return None
    tokens = [_spelling(tokenizer, token_id) for token_id in choice.token_ids]
    detokenizer = IncrementalDetokenizer(tokenizer)
    detokenizer.feed(choice.token_ids)
    return {
        "tokens": tokens,
        "token_logprobs": [
            _finite(entries[token_id].logprob)
            for token_id, entries in zip(choice.token_ids, choice.logprobs, strict=True)
        ],
        "top_logprobs": [
            {_spelling(tokenizer, token_id): _finite(value.logprob) for token_id, value in entries.items()}
            for entries in choice.logprobs
        ],
        "text_offset": [0, *detokenizer.offsets][: len(tokens)],
    }


def _prompt_logprobs(entries: Mapping[int, Logprob] | None) -> dict[str, dict[str, Any]] | None:
    """One prompt position, by token id as vLLM writes it; None for the first, which nothing predicts."""
    if entries is None:
        return None
    return {
        str(token_id): {"logprob": _finite(value.logprob), "rank": value.rank, "decoded_token": value.decoded_token}
        for token_id, value in entries.items()
    }


def _spelling(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as a unique text: bytes that are no whole character are spelled out."""
    data = tokenizer.id_to_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(value: float) -> float:
    """JSON knows neither infinity nor NaN; a logprob that is no number counts as the least there is."""
    return max(value, _MIN_LOGPROB) if value == value else _MIN_LOGPROB


_KINDS: dict[type, str] = {int: "an integer", str: "a string", bool: "true or false", dict: "an object"}


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
