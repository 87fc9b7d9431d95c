"""Options of the property tests, and engines around scripted models."""

from collections.abc import Callable, Iterator
from dataclasses import fields

import numpy as np
import pytest
import torch

from deepinfer.core.config import EngineConfig
from deepinfer.core.engine import Engine
from deepinfer.core.outputs import RequestOutput
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.testing import PuppetModel
from deepinfer.testing.workloads import cpu_ops

SMALL = {"num_kv_blocks": 64, "block_size": 4, "window_page": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("workloads")
    group.addoption("--workloads", type=int, default=2000, help="random workloads to run with HashModel")
    group.addoption("--workload-seed", type=int, default=None, help="run the workload of this seed only")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from a second thread, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """Makes engines around a model; settings that this version lacks are left out. All are closed in the end."""
    engines: list[Engine] = []
    known = {f.name for f in fields(EngineConfig)}

    def make(model, **settings) -> Engine:
        chosen = {name: value for name, value in (SMALL | settings).items() if name in known}
        engines.append(Engine(model, EngineConfig(**chosen), cpu_ops()))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        assert engine.blocks.num_free_blocks == engine.blocks.pool.num_blocks
        engine.blocks.pool.check()


@pytest.fixture
def count_up() -> Callable[..., PuppetModel]:
    """Makes puppets that answer each token with the next number."""

    def make(vocab_size: int = 32, **options) -> PuppetModel:
        return PuppetModel(
            vocab_size, lambda ids: 10.0 * (np.arange(vocab_size) == (ids[-1] + 1) % vocab_size), **options
        )

    return make


@pytest.fixture
def ask() -> Callable[..., dict[str, RequestOutput]]:
    """Runs prompts to their end, each with its own or common parameters; gives results by id."""

    def run(engine: Engine, prompts, params=None, **options) -> dict[str, RequestOutput]:
        params = params or SamplingParams(temperature=0, max_tokens=4)
        several = params if isinstance(params, list) else [params] * len(prompts)
        for i, (prompt, p) in enumerate(zip(prompts, several, strict=True)):
            engine.add_request(str(i), prompt, p, seed_key=i, **options)
        return finish(engine)

    return run


@pytest.fixture
def drain() -> Callable[[Engine], dict[str, RequestOutput]]:
    """Steps an engine until nothing is left; gives finished results by id."""
    return finish


def finish(engine: Engine) -> dict[str, RequestOutput]:
    done: dict[str, RequestOutput] = {}
    for _ in range(10_000):
        if not engine.has_unfinished():
            return done
        for output in engine.step():
            if output.finished:
                assert output.request_id not in done, "a result came twice"
                done[output.request_id] = output
    raise AssertionError("the engine does not come to an end")
