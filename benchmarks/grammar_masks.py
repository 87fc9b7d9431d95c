"""Masks of constrained rows at the model's vocabulary: `python benchmarks/grammar_masks.py`.

First the masks alone: 256 answers at random places of a JSON document, one call of `GrammarMasks.fill` as a step makes
it, without drafts and with four legal ones each. Then whole steps: 1,024 running requests, of which none and then a
tenth have a form, with a model that costs nothing. What a device would do is left out of the host's own time. A
stand-in does it: 1,024 rows of logits are half a gigabyte, and a CPU that zeroes and searches them leaves nothing in
its caches of what the host works on, as no other device would do. `--cpu` lets the CPU do it nevertheless.

Processor time of one thread, medians and, as other processes make memory slow, least values; the load average is
printed. The figures that the project holds itself to: 256 rows under 5 ms, and the host's own time of such a step under
3 ms.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from typing import Any

import numpy as np
import torch
from host_overhead import Clock, v41_like
from torch import Tensor

from deepinfer.core.config import EngineConfig
from deepinfer.core.engine import Engine
from deepinfer.core.grammar.masks import GrammarMasks
from deepinfer.core.grammar.service import GrammarService
from deepinfer.core.grammar.shaper import GrammarShaper
from deepinfer.core.grammar.spec import StructuredOutput
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.models.interface import StepBatch
from deepinfer.ops.registry import BoundOp
from deepinfer.testing import NullModel
from deepinfer.testing.workloads import cpu_ops

VOCAB, EOS, ROWS, REQUESTS, CONSTRAINED, STEPS = 129280, 1, 256, 1024, 102, 150

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
DOCUMENT = (
    '{"name": "Ada of Svealand", "age": 12345, "tags": ["red", "tall"], '
    '"address": {"street": "Main road 5", "zip": "12345"}}'
)


def synthetic_tokenizer(size: int) -> Tokenizer:
    """A byte-level vocabulary with pieces of words, of JSON and of Chinese text in about the shares of a real one."""
    rng = random.Random(0)
    letters, weights = "etaoinshrdlucmfwypvbgkjqxz", [1 / (place + 1) for place in range(26)]
    alphabet = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
    alphabet += [chr(0x100 + place) for place in range(256 - len(alphabet))]
    spelled = dict.fromkeys(["<bos>", "<eos>", "<pad>", *alphabet])
    space, byte = "Ġ", dict(zip(range(256), _bytes_in_order(alphabet), strict=True))
    for piece in ('":', '",', '{"', '"}', "},", "],", '":"', '","', ": ", "12", "123", "true", "false", "null"):
        spelled[piece.replace(" ", space)] = None
    while len(spelled) < size:
        word = "".join(rng.choices(letters, weights, k=rng.randint(2, 10)))
        kind = rng.random()
        if kind < 0.5:
            word = space + word
        elif kind < 0.6:
            word = word.capitalize()
        elif kind < 0.75:
            word = "".join(byte[b] for b in chr(rng.randrange(0x4E00, 0x9000)).encode())
        spelled[word] = None
    special = [{"id": i, "content": text, "special": True} for i, text in enumerate(("<bos>", "<eos>", "<pad>"))]
    definition: dict[str, Any] = {
        "model": {"type": "BPE", "vocab": {text: i for i, text in enumerate(spelled)}, "merges": []},
        "added_tokens": [
            {**token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False} for token in special
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    }
    return Tokenizer(definition, bos="<bos>", eos="<eos>", pad="<pad>")


class StandIn:
    """Does for a device what matters to the host: every row draws the lowest id that its mask allows, else id 5.

    Args:
        count: of rows, at most.
    """

    def __init__(self, count: int) -> None:
        self._logits = torch.zeros(1, VOCAB).expand(count, VOCAB)
        self._masked: tuple[Tensor, Tensor] | None = None
        self._run = BoundOp.__call__

    def forward(self, batch: StepBatch, *_: object) -> Tensor:
        """Equal logits."""
        return self._logits[: len(batch.logits_rows)]

    def call(self, op: BoundOp[Any, Any], *args: Any, **kwargs: Any) -> Any:
        """Run an op, or do without it."""
        if op.op.name == "apply_bitmask":
            self._masked = args[1], args[2]
            return None
        if op.op.name != "sample":
            return self._run(op, *args, **kwargs)
        tokens = np.full(args[0].shape[0], 5, np.int32)
        if self._masked is not None:
            masks, rows = (part.numpy() for part in self._masked)
            lowest = [int((word := np.flatnonzero(mask)[0]) * 32 + _lowest_bit(int(mask[word]))) for mask in masks]
            tokens[rows >= 0] = np.array(lowest, np.int32)[rows[rows >= 0]]
            self._masked = None
        return torch.from_numpy(tokens)


def _lowest_bit(word: int) -> int:
    return (word & -word).bit_length() - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="let the CPU do what a device would")
    cpu = parser.parse_args().cpu
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    torch.set_num_threads(1)
    tokenizer = synthetic_tokenizer(VOCAB)
    service = GrammarService(tokenizer, VOCAB, (EOS,), timeout=300)
    try:
        start = time.perf_counter()
        spec = StructuredOutput(json_schema=SCHEMA)
        job = service.submit(spec, service.source(spec))
        service.compiler.wait([job], 300)
        print(f"schema compiled in {time.perf_counter() - start:.2f} s, the start of its worker included")
        masks_alone(tokenizer, job)
        for constrained in (0, CONSTRAINED):
            whole_steps(tokenizer, service, spec, constrained, cpu=cpu)
    finally:
        service.close()


def masks_alone(tokenizer: Tokenizer, job: Any) -> None:
    """Time of masks for rows at random places of the document."""
    rng = random.Random(0)
    masks = GrammarMasks(cpu_ops().context.runtime, VOCAB)
    ids = tokenizer.encode(DOCUMENT)
    for drafts in (0, 4):
        answers = []
        for _ in range(ROWS):
            place = rng.randrange(len(ids) - drafts)
            shaper = GrammarShaper(masks, stop_token_ids=(EOS,), ends=(EOS,))
            shaper.start(job.grammar)
            shaper.accept(ids[:place])
            answers.append((shaper, ids[place : place + drafts]))
        seconds = []
        for _ in range(STEPS):
            start = time.process_time()
            if drafts:
                masks.fill(answers)
            else:
                masks.fill([], [shaper for shaper, _ in answers])
            seconds.append(time.process_time() - start)
        rows = masks.num_rows // STEPS
        masks.num_rows = 0
        print(f"{ROWS} answers, {drafts} drafts each: {rows} rows in {_milliseconds(seconds)}")


def whole_steps(
    tokenizer: Tokenizer, service: GrammarService, spec: StructuredOutput, constrained: int, *, cpu: bool
) -> None:
    """Host time of decode steps with some of all requests constrained."""
    model = NullModel(VOCAB, cache_spec=v41_like(), max_position=8192)
    model.info = type(model.info)("null", VOCAB, 8192, (EOS,))
    config = EngineConfig(max_num_seqs=REQUESTS, max_num_batched_tokens=2048, num_kv_blocks=4 * REQUESTS)
    engine = Engine(model, config, cpu_ops(), tokenizer, grammars=service)
    most = STEPS + 8
    for i in range(REQUESTS):
        form = spec if i < constrained else None
        params = SamplingParams(
            max_tokens=most, min_tokens=most if form else 0, temperature=0.0, structured_output=form
        )
        engine.add_request(str(i), [5, 6, 7, 8], params)
    while engine.scheduler.waiting or engine.stats().num_compiling:
        engine.step()
    clock, call = Clock(), BoundOp.__call__
    if not cpu:
        stand_in = StandIn(REQUESTS)
        model.forward = stand_in.forward  # type: ignore[method-assign]
        BoundOp.__call__ = lambda op, *args, **kwargs: stand_in.call(op, *args, **kwargs)  # type: ignore[method-assign]
    clock.wrap(model, "forward", "device")
    clock.wrap(BoundOp, "__call__", "device")
    clock.wrap(engine, "step", "step")
    for _ in range(STEPS):
        engine.step()
        clock.finish_step()
    BoundOp.__call__ = call  # type: ignore[method-assign]
    own = [step["step"] - step["device"] for step in clock.steps]
    print(f"{REQUESTS} requests, {constrained} constrained: host's own time {_milliseconds(own)} per step")
    engine.close()


def _milliseconds(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f} ms (least {min(seconds) * 1e3:.2f})"


def _bytes_in_order(alphabet: list[str]) -> list[str]:
    """The letter of each byte, 0 to 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = dict(zip([*printable, *others], alphabet, strict=True))
    return [letters[byte] for byte in range(256)]


if __name__ == "__main__":
    main()
