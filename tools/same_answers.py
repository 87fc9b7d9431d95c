"""Whether a small checkpoint answers on a backend as it does on the CPU, token by token.

    python tools/same_answers.py --backend cuda_sm90 [--model DIR] [--suite tiny] [--limit 6] [--score 16] [--jobs 3]

Questions are the first items of each task of an evaluation suite. The CPU answers them greedily. The backend is made to
say the same tokens (`golden_token_ids`), so that every position is judged behind the same text, and tells which token
it would have said. A difference counts where the CPU was sure: its best two tokens are further apart than `SURE`. The
backend's own free answers are compared as well, for information: behind a tie they may go another way.

Twice: in float32 with unrounded caches, where two right programs differ in the last bits only, and in bfloat16 as
served. Without `--model` a random checkpoint is made, which is never sure for long and so the harder test of the two.

Kernels that have no proof are not verified first, since answers are what is judged here.

With `--score N` both are asked N items of each task in bfloat16, and as many answers must be right, but for chance: as
far as answers differ at all, a difference is as likely to help as to harm.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from deepinfer import LLM, SamplingParams
from deepinfer.core.outputs import CompletionOutput
from deepinfer.entrypoints.eval_tasks import make_items
from deepinfer.entrypoints.evaluation import Evaluation, chosen_tasks, evaluate
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny

SURE: Final = {"float32": 1e-3, "bfloat16": 0.5}
"""Distance of the best two log probabilities from which on the other program must choose the same token."""
ALLOWED: Final = {"float32": 0.0, "bfloat16": 0.01}
"""Share of positions that may differ though the CPU was sure: where activations are rounded, a sum next to an edge
moves an expert or a key, and with it a whole row."""
NUMERICS: Final[dict[str, dict[str, Any]]] = {
    "float32": {"kv_rounding": False, "activation_rounding": False},
    "bfloat16": {},
}
MAX_TOKENS: Final = 24
SIGMAS: Final = 2.5
"""Standard deviations that scores may be apart."""


@dataclass
class Comparison:
    """All positions of all answers.

    Attributes:
        positions: compared.
        different: where the best tokens differ.
        sure: of those, where the CPU was sure.
        equal_answers: free answers that are equal to the end.
        answers: in all.
        largest: difference of the log probability of one token.
    """

    positions: int = 0
    different: int = 0
    sure: int = 0
    equal_answers: int = 0
    answers: int = 0
    largest: float = 0.0

    def holds(self, dtype: str) -> bool:
        """Whether few enough positions differ."""
        return self.positions > 0 and self.sure <= ALLOWED[dtype] * self.positions


def compare(
    here: Sequence[CompletionOutput],
    forced: Sequence[CompletionOutput],
    free: Sequence[CompletionOutput],
    sure: float,
) -> Comparison:
    """Compare answers with the two best log probabilities of each position.

    Args:
        here: of the CPU.
        forced: the same tokens said by the backend.
        free: what the backend says by itself.
        sure: distance of log probabilities.
    """
    found = Comparison()
    for mine, theirs, own in zip(here, forced, free, strict=True):
        assert mine.logprobs is not None and theirs.logprobs is not None, "asked for"
        found.answers += 1
        found.equal_answers += list(mine.token_ids) == list(own.token_ids)
        for token, left, right in zip(mine.token_ids, mine.logprobs, theirs.logprobs, strict=True):
            best, second = sorted((entry.logprob for entry in left.values()), reverse=True)[:2]
            said = max(right, key=lambda token_id: right[token_id].logprob)
            found.positions += 1
            found.different += said != token
            found.sure += said != token and best - second > sure
            found.largest = max(found.largest, abs(left[token].logprob - right[token].logprob))
    return found


def questions(llm: LLM, suite: str, limit: int) -> list[list[int]]:
    """Prompts of the first items of each task that fit the model."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None, "a checkpoint has one"
    room = llm.config.max_model_len or llm.engine.model.info.max_position
    prompts = []
    for name, spec in chosen_tasks(suite).items():
        if spec.pass_key_tokens < room:
            items = make_items(spec, name, lambda text: len(tokenizer.encode(text)), limit)
            prompts += [llm.prompts.read_chat(item.request).token_ids for item in items]
    return [list(ids) for ids in prompts if len(ids) + MAX_TOKENS <= room]


def ask(llm: LLM, prompts: Sequence[list[int]], say: Sequence[Sequence[int]] | None = None) -> list[CompletionOutput]:
    """Greedy answers with the two best log probabilities of each position.

    Args:
        llm: answers.
        prompts: token ids.
        say: what to answer, whatever the model says.
    """
    plain = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=2)
    params = [plain] * len(prompts)
    if say is not None:
        params = [
            SamplingParams(
                temperature=0.0, max_tokens=len(ids), logprobs=2, golden_token_ids=tuple(ids), ignore_eos=True
            )
            for ids in say
        ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    errors = [str(output.error) for output in outputs if output.error is not None]
    if errors:
        raise SystemExit(f"{len(errors)} questions failed: {errors[0]}")
    return [output.outputs[0] for output in outputs]


def main() -> int:
    """Ask, compare, print a table; 0 when all holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--model", help="a checkpoint folder; one is made when none is named")
    parser.add_argument("--suite", default="tiny")
    parser.add_argument("--limit", type=int, default=6, help="items of each task")
    parser.add_argument("--score", type=int, default=0, help="items of each task whose answers are judged as well")
    parser.add_argument("--jobs", type=int, default=1, help="processes: most of the time is compiling for the device")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        model = options.model or str(Path(place) / "random")
        if not options.model:
            make_tiny(model, seed=5)
        asked = (options.backend, options.suite)
        tasks = [partial(run, model, dtype, *asked, options.limit) for dtype in NUMERICS]
        if options.score:
            tasks.append(partial(score, model, *asked, options.score))
        if options.jobs == 1:
            holds = [task() for task in tasks]
        else:
            with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
                holds = [done.result() for done in [pool.submit(task) for task in tasks]]
    return 0 if all(holds) else 1


def run(model: str, dtype: str, backend: str, suite: str, limit: int) -> bool:
    """One line of the table; whether it holds."""
    torch.set_num_threads(1)
    settings = {"dtype": dtype, "verify_kernels": False, **NUMERICS[dtype]}
    with LLM(model, backend="cpu", **settings) as llm:
        prompts = questions(llm, suite, limit)
        here = ask(llm, prompts)
    with LLM(model, backend=backend, **settings) as llm:
        found = compare(here, ask(llm, prompts, [answer.token_ids for answer in here]), ask(llm, prompts), SURE[dtype])
    holds = found.holds(dtype)
    print(
        f"{'ok  ' if holds else 'FAIL'} {dtype:8}: of {found.positions} positions {found.different} have another best "
        f"token, {found.sure} of them where the CPU was sure by {SURE[dtype]:g}; {found.equal_answers} of "
        f"{found.answers} free answers are equal; largest difference of a log probability {found.largest:.2g}",
        flush=True,
    )
    return holds


def score(model: str, backend: str, suite: str, limit: int) -> bool:
    """One more line: how many answers are right, by the rules of `deepinfer eval`; whether that is as on the CPU."""
    torch.set_num_threads(1)
    results = {}
    for name in ("cpu", backend):
        result = Evaluation(model, suite, {})
        with LLM(model, backend=name, verify_kernels=False) as llm:
            evaluate(llm, chosen_tasks(suite), result, limit=limit)
        results[name] = result
    here, there = results["cpu"], results[backend]
    differing = sum(mine != theirs for mine, theirs in zip(here.answers, there.answers, strict=True))
    holds = not there.total.failed and scores_agree(here.total.correct, there.total.correct, differing)
    print(
        f"{'ok  ' if holds else 'FAIL'} bfloat16: {here.total.correct} of {here.total.total} answers are right on the "
        f"CPU, {there.total.correct} on {backend}; {differing} answers differ, {there.total.failed} failed",
        flush=True,
    )
    return holds


def scores_agree(here: int, there: int, differing: int) -> bool:
    """Whether two numbers of right answers are as near as chance brings them.

    Args:
        here: right answers of one.
        there: of the other.
        differing: answers that are not equal.
    """
    return abs(here - there) <= SIGMAS * math.sqrt(differing)


if __name__ == "__main__":
    sys.exit(main())
