"""Scripted engines and models, so that everything above them can be tested without a checkpoint."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepinfer import AsyncLLM
from deepinfer.core.config import EngineConfig
from deepinfer.core.detokenizer import IncrementalDetokenizer
from deepinfer.core.engine import Engine
from deepinfer.core.errors import RequestError
from deepinfer.core.outputs import CompletionOutput, Logprob, RequestOutput
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.entrypoints.chat_formats import chat_format
from deepinfer.entrypoints.llm import LLM
from deepinfer.testing import PuppetModel
from deepinfer.testing.workloads import cpu_ops

DATA = Path(__file__).parents[1] / "data"


@dataclass
class Live:
    output: RequestOutput
    params: object
    detokenizer: IncrementalDetokenizer | None


@dataclass
class FakeEngine:
    """Answers `script(prompt_token_ids, step)`; a token of None is a numerical error."""

    config: EngineConfig
    tokenizer: Tokenizer | None
    script: Callable[[list[int], int], int | None]
    vocab_size: int = 384
    eos: int = 1
    max_len: int = 200
    requests: dict[str, Live] = field(default_factory=dict)
    ended: list[RequestOutput] = field(default_factory=list)
    log: list[tuple[str, object]] = field(default_factory=list)
    most_live: int = 0
    generated: int = 0
    closed: bool = False

    def add_request(self, request_id, prompt_token_ids, params, *, prompt=None, seed_key=None, **options):
        params.validate(self.vocab_size)
        ids = list(prompt_token_ids)
        if len(ids) > self.max_len:
            raise RequestError("prompt_too_long", f"the prompt has {len(ids)} tokens; this engine takes {self.max_len}")
        if not all(0 <= i < self.vocab_size for i in ids):
            raise RequestError("token_out_of_range", "ids run from 0 to 383")
        output = RequestOutput(request_id, prompt, ids, [CompletionOutput()], seed=hash(seed_key) % 2**64)
        if params.logprobs is not None:
            output.outputs[0].logprobs = []
            output.outputs[0].cumulative_logprob = 0.0
        if options.get("return_logits"):
            output.prompt_logits = torch.zeros(len(ids), self.vocab_size)
        detokenizer = IncrementalDetokenizer(self.tokenizer) if self.tokenizer else None
        self.requests[request_id] = Live(output, params, detokenizer)
        self.log.append(("add", seed_key))
        self.most_live = max(self.most_live, len(self.requests))
        return output

    def step(self):
        changed, self.ended = self.ended, []
        for request_id in list(self.requests)[: self.config.max_num_seqs]:
            live = self.requests[request_id]
            done = live.output.outputs[0]
            token = self.script(live.output.prompt_token_ids, len(done.token_ids)) if live.params.max_tokens else -1
            if token is None:
                live.output.error, done.finish_reason = RequestError("numerical_error", "NaN"), "error"
            elif token >= 0:
                self.generated += 1
                done.token_ids.append(token)
                if done.logprobs is not None:
                    done.logprobs.append({token: Logprob(-0.5, 1), (token + 1) % 300: Logprob(float("-inf"), 2)})
                if token == self.eos:
                    done.finish_reason = "stop"
                elif live.detokenizer:
                    done.text += live.detokenizer.feed([token])
            if done.finish_reason is None and len(done.token_ids) >= live.params.max_tokens:
                done.finish_reason = "length"
            if done.finish_reason is not None:
                live.output.finished = True
                del self.requests[request_id]
            changed.append(live.output)
        return changed

    def has_unfinished(self):
        return bool(self.requests or self.ended)

    def abort(self, request_id):
        live = self.requests.pop(request_id, None)
        self.log.append(("abort", request_id))
        if live is not None:
            live.output.finished, live.output.outputs[0].finish_reason = True, "abort"
            self.ended.append(live.output)
        return live is not None

    def stats(self):
        return SimpleNamespace(num_generated_tokens=self.generated, num_running=len(self.requests), speculation=None)

    def close(self):
        self.closed = True


@pytest.fixture
def one_thread():
    """Small tensors gain nothing from a second thread, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(DATA)


def letters(prompt_token_ids: list[int], step: int) -> int:
    """Endless letters that depend on the prompt."""
    return 40 + (sum(prompt_token_ids) + 7 * step) % 26


@pytest.fixture
def make_llm(tokenizer):
    def make(script=letters, *, text=True, **settings):
        config = EngineConfig(model="models/tiny", **settings)
        used = tokenizer if text else None
        chat = chat_format("DeepseekV41ForCausalLM") if text else None
        return LLM.from_engine(FakeEngine(config, used, script), tokenizer=used, chat=chat)

    return make


@pytest.fixture
def spell(tokenizer):
    """A script that says a text, control tokens included, and ends."""

    def make(text: str, end: bool = True):
        ids = tokenizer.encode(text, parse_special=True)

        def script(prompt_token_ids: list[int], step: int) -> int:
            return ids[step] if step < len(ids) else (tokenizer.eos_token_id if end else ids[-1])

        return script

    return make


def chat_line(custom_id: str, content: str = "Hi", **body) -> dict:
    messages = [{"role": "user", "content": content}]
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": messages, "max_tokens": 4, **body},
    }


def completion_line(custom_id: str, prompt: object = "Once", **body) -> dict:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": prompt, "max_tokens": 4, **body},
    }


@pytest.fixture
def lines():
    """Builders of input lines."""
    return SimpleNamespace(chat=chat_line, completion=completion_line)


@pytest.fixture
def write_input(tmp_path):
    def write(items, name="in.jsonl") -> Path:
        path = tmp_path / name
        raw = [item if isinstance(item, bytes) else json.dumps(item, ensure_ascii=False).encode() for item in items]
        path.write_bytes(b"".join(line + b"\n" for line in raw))
        return path

    return write


def read_lines(path: Path) -> list[dict]:
    data = path.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


@pytest.fixture
def read_output():
    return read_lines


@pytest.fixture
def puppet_engine(tokenizer):
    """Makes engines whose model thinks out loud and then answers, letter by letter, at temperature 0."""

    def make(text="why not</think>0123456789 the end", **settings):
        said = [*tokenizer.encode(text, parse_special=True), tokenizer.eos_token_id]
        starts = {tokenizer.token_to_id("<think>"), tokenizer.bos_token_id}

        def logits(ids):
            row = np.zeros(384)
            begin = max((i for i, t in enumerate(ids) if t in starts), default=0)
            if ids[begin] == tokenizer.bos_token_id:
                begin = 1
            row[said[min(len(ids) - 1 - begin, len(said) - 1)]] = 4.0
            return row

        config = EngineConfig(model="models/tiny", block_size=16, max_model_len=1024, num_kv_blocks=128, **settings)
        return Engine(PuppetModel(384, logits, eos_token_ids=(tokenizer.eos_token_id,)), config, cpu_ops(), tokenizer)

    return make


@pytest.fixture
def llms(puppet_engine, tokenizer):
    """Makes an `LLM` and an `AsyncLLM` on equal engines of their own."""
    made = []

    def make(*args, **settings):
        chat = chat_format("DeepseekV41ForCausalLM")
        made.append(LLM.from_engine(puppet_engine(*args, **settings), tokenizer=tokenizer, chat=chat))
        made.append(AsyncLLM.from_engine(puppet_engine(*args, **settings), tokenizer=tokenizer, chat=chat))
        return made[-2:]

    yield make
    for llm in made:
        getattr(llm, "close", getattr(llm, "shutdown", None))()
