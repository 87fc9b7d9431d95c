"""The model that is trained is the model that the engine runs.

An exported checkpoint must give, in the engine with float32 activations, what the training program computes in the
phase that rounds as storage does: logits of every row, drafts and confidences.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from deepinfer import LLM
from deepinfer.core.tokenizer import TOKENIZER_FILE
from deepinfer.models.checkpoint import Checkpoint
from deepinfer.models.deepseek_v41_flash.config import ModelConfig
from deepinfer.models.deepseek_v41_flash.engram_tables import EngramConstants
from deepinfer.models.deepseek_v41_flash.tensors import expected_tensors
from deepinfer.models.interface import DraftBatch
from deepinfer.ops.formats import QTensor
from deepinfer.ops.quant import dequantize, e4m3_value, quantize, ue8m0_value
from tools.train_tiny.attention import select
from tools.train_tiny.data import Batch
from tools.train_tiny.draft import Anchors, draft
from tools.train_tiny.export import export
from tools.train_tiny.model import Backbone
from tools.train_tiny.rounding import changes_by_storing, quantize_blocks, rounded, stored_values, through
from tools.train_tiny.settings import ALIGNMENT, EXPORTED, MINI_VOCAB, Phase
from tools.train_tiny.store import WeightStore

UNROUNDED = replace(EXPORTED, caches=False)
ENGINE = {"backend": "cpu", "dtype": "float32", "max_model_len": 512, "block_size": 32, "num_threads": 1}
NUM_IDS = 160  # many times the window, the selection and the pool of the mini configuration


@pytest.fixture(scope="module")
def store(config):
    """Weights as different from their first values as training leaves them."""
    store = WeightStore(ModelConfig.from_dict(config), seed=3)
    generator = torch.Generator().manual_seed(0)
    lively = ("gate.bias", "attn_sink", "_base", "confidence_head.proj.weight")
    with torch.no_grad():
        for name, p in store.named():
            if name.endswith(lively):
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
            elif name.endswith("_scale"):
                p.fill_(0.5)
            elif "wo_b" in name or ".w2." in name:
                p.mul_(4)
            elif "norm" in name:
                p.mul_(0.7 + 0.6 * torch.rand(p.shape, generator=generator))
    return store


@pytest.fixture(scope="module")
def backbone(store, encoder):
    constants = EngramConstants.build(store.config.text, encoder)
    return Backbone(store, constants, torch.float32, exact_choice=True)


@pytest.fixture(scope="module")
def checkpoint(store, config, run_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "model"
    export(store, config, (run_folder / TOKENIZER_FILE).read_text(encoding="utf-8"), folder)
    return folder


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, MINI_VOCAB, (NUM_IDS,), generator=torch.Generator().manual_seed(1))


def packed(*documents, window=16):
    """One row of documents, each padded to the alignment, and the place where each begins."""
    ids, positions, numbers, starts = [], [], [], []
    for number, document in enumerate(documents):
        room = -(-len(document) // ALIGNMENT) * ALIGNMENT
        starts.append(len(ids))
        ids += document.tolist() + [2] * (room - len(document))
        positions += range(room)
        numbers += [number] * room
    tail = -len(ids) % window
    row = [torch.tensor([x + [0] * tail]) for x in (ids, positions, numbers)]
    row[2][0, len(ids) :] = len(documents)
    none = torch.zeros(1, 1)
    return Batch(*row, torch.zeros(1, len(ids) + tail), none.long(), none), starts


@torch.no_grad()
def logits_of(backbone, phase, *documents):
    batch, starts = packed(*documents)
    logits = backbone.logits(backbone(batch, phase))
    return [logits[start : start + len(document)] for start, document in zip(starts, documents, strict=True)]


@pytest.mark.parametrize("phase", [EXPORTED, UNROUNDED], ids=["rounded caches", "float32 caches"])
def test_the_engine_gives_the_logits_of_the_training_model(backbone, checkpoint, ids, phase) -> None:
    (mine,) = logits_of(backbone, phase, ids)
    with LLM(str(checkpoint), kv_rounding=phase.caches, **ENGINE) as llm:
        theirs = llm.logits(ids.tolist(), chunk_size=64)
    assert float(theirs.std()) > 0.3
    difference = (mine - theirs).abs()
    # With rounding, a sum that differs in its last bit may become the next code, and every later row sees that.
    mean, most = (2e-3, 0.3) if phase.caches else (1e-5, 1e-4)
    assert float(difference.mean()) < mean and float(difference.max()) < most


def test_the_selection_and_the_pool_leave_entries_out(backbone, ids) -> None:
    (sparse,), (dense,) = (logits_of(backbone, phase, ids) for phase in (UNROUNDED, replace(UNROUNDED, sparse=False)))
    assert float((sparse[:8] - dense[:8]).abs().max()) < 1e-5
    assert float((sparse[64:] - dense[64:]).abs().max()) > 1e-3


def test_packed_documents_do_not_see_each_other(backbone, ids) -> None:
    first, second = ids[:53], ids[53:]
    together = logits_of(backbone, UNROUNDED, first, second)
    for alone, document in zip(together, (first, second), strict=True):
        assert float((alone - logits_of(backbone, UNROUNDED, document)[0]).abs().max()) < 1e-4


@pytest.mark.parametrize("sparse", [True, False])
def test_a_row_does_not_see_what_follows(backbone, ids, sparse) -> None:
    phase = replace(UNROUNDED, sparse=sparse)
    (whole,), (part,) = logits_of(backbone, phase, ids), logits_of(backbone, phase, ids[:70])
    assert float((whole[:70] - part).abs().max()) < 1e-4


def test_the_engine_drafts_as_the_training_model(backbone, checkpoint, ids) -> None:
    place = 100
    prompt = ids[: place + 1]
    theirs = engine_draft(checkpoint, prompt.tolist())
    tokens = torch.cat((prompt[-1:], theirs.tokens[0].long()))[None]
    batch, _ = packed(prompt)
    with torch.no_grad():
        passed = backbone(batch, EXPORTED)
        anchors = Anchors(torch.tensor([0]), torch.tensor([place]), tokens)
        mine = draft(backbone, passed, batch.positions, batch.documents, anchors, EXPORTED)
    assert torch.equal(mine.logits[0].argmax(-1), theirs.tokens[0].long())
    assert float((mine.logits - theirs.logits).abs().mean()) < 2e-3
    assert float((mine.confidence.sigmoid() - theirs.confidences).abs().max()) < 2e-3


def engine_draft(checkpoint, prompt):
    """What the engine drafts behind the last token of `prompt`."""
    with LLM(str(checkpoint), load_draft=True, **ENGINE) as llm, torch.inference_mode():
        engine, last = llm.engine, len(prompt) - 1
        executor, blocks, first = engine.executor, engine.blocks, np.array([0], np.int32)
        seq = blocks.open(np.array(prompt, dtype=np.int32))
        handles = np.array([seq], np.int32)
        blocks.reserve(seq, last)
        step = executor.plan(handles, np.array([last], np.int32))
        executor.forward(executor.batch(step, first), None)
        blocks.commit(handles, np.array([last], np.int32))
        blocks.reserve(seq, last + 1)
        step = executor.plan(handles, np.ones(1, np.int32))
        tables = executor.batch(step, first)
        batch = DraftBatch(
            anchor_ids=executor.send(step.input_ids[:1]),
            anchor_positions=executor.send(step.positions[:1]),
            seqs=executor.send(first),
            window_tables=tables.window_tables,
            window_first_page=tables.window_first_page,
            window_page=tables.window_page,
            scratch=engine.model.draft.new_scratch(1),
        )
        return engine.model.draft.draft(batch, executor.caches, None, with_logits=True)


def test_an_export_has_every_tensor_and_the_values_that_were_trained_with(checkpoint, store, config) -> None:
    opened = Checkpoint.open(checkpoint)
    specs = expected_tensors(ModelConfig.from_dict(config))
    opened.validate(specs, {"backbone", "engram", "draft"}, skipped=lambda name: False)
    for name in specs:
        if name.endswith(".scale"):
            continue
        value = opened.get(name)
        scale_name = f"{name.removesuffix('.weight')}.scale"
        if scale_name in specs:
            value = decoded(value, opened.get(scale_name))
        stacked = (
            name if ".experts." not in name else f"{name.split('.experts.')[0]}.experts.{name.split('.')[-2]}.weight"
        )
        want = stored_values(store.tensor_of(name), store.storage[stacked])
        assert torch.equal(value.float(), want), name


def decoded(codes, scale):
    scale = scale.view(torch.uint8)
    if codes.dtype == torch.int8:
        return dequantize(QTensor(codes.view(torch.uint8), scale, "mxfp4"), torch.float32)
    values = e4m3_value(codes.view(torch.uint8))
    if scale.shape[0] == codes.shape[0]:
        return dequantize(QTensor(codes.view(torch.uint8), scale, "mxfp8"), torch.float32)
    wide = ue8m0_value(scale).repeat_interleave(32, 0).repeat_interleave(32, 1)
    return values * wide[: codes.shape[0], : codes.shape[1]]


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "nvfp4"])
def test_rounding_passes_its_gradient(fmt) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    y = through(x, fmt)
    assert 0 < float((y - x).detach().abs().max()) < 1
    assert torch.allclose(through(y, fmt), y, atol=1e-6), "what is rounded stays"
    (y * torch.arange(64.0)).sum().backward()
    assert torch.equal(x.grad, torch.arange(64.0).expand(5, 64))


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "nvfp4"])
def test_rounded_values_are_those_of_codes(fmt) -> None:
    draw = torch.Generator().manual_seed(3)
    spread = 2.0 ** torch.randint(-20, 12, (400, 1), generator=draw)
    x = torch.cat(
        (torch.randn(400, 64, generator=draw) * spread, torch.arange(-32.0, 32.0)[None] / 4, torch.zeros(1, 64))
    )
    assert torch.equal(rounded(x, fmt), dequantize(quantize(x, fmt), torch.float32))


@pytest.mark.parametrize("storage", ["bf16", "fp8_blocks", "fp8_rows", "fp4", "f32"])
def test_weights_are_changed_by_storing_as_each_would_be_alone(storage) -> None:
    draw = torch.Generator().manual_seed(2)
    weights = {
        name: torch.randn(shape, generator=draw) for name, shape in (("a", (33, 64)), ("b", (33, 64)), ("c", (7, 32)))
    }
    changes = changes_by_storing(weights, dict.fromkeys(weights, storage))
    assert sorted(changes) == ([] if storage == "f32" else ["a", "b", "c"])
    for name, change in changes.items():
        assert float(change.abs().max()) > 0
        assert torch.allclose(weights[name] + change, stored_values(weights[name], storage), atol=1e-6)


def test_blocks_of_32_share_a_power_of_two() -> None:
    values = torch.zeros(40, 64)
    values[:32, :32], values[33, 40] = 448.0, 1.0
    codes, exponents = quantize_blocks(values)
    assert codes.shape == (40, 64) and exponents.shape == (2, 2)
    assert exponents[0, 0] == 127 and exponents[1, 1] == 127 - 8
    assert float(codes[0, 0]) == 448 and float(codes[33, 40]) * 2.0**-8 == 1.0


def test_fast_selection_chooses_what_the_exact_one_does(ids) -> None:
    scores = torch.randn(2, 40, 20, generator=torch.Generator().manual_seed(4))
    last = torch.arange(20) * 2 + 1
    scores = scores.masked_fill(last > torch.arange(40)[:, None], -torch.inf)
    exact, fast = (select(scores, 6, 2, exact=exact) for exact in (True, False))
    assert torch.equal(exact.sort(-1).values, fast.sort(-1).values)


def test_an_untrained_phase_costs_no_indexer(backbone, ids) -> None:
    batch, _ = packed(ids)
    with torch.no_grad():
        assert float(backbone(batch, Phase()).index_loss) == 0
        assert float(backbone(batch, Phase(index=True)).index_loss) > 0
