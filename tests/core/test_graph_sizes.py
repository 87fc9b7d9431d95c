"""Shapes of captured steps, and the memory that graphs share."""

import itertools

import pytest
import torch

from deepinfer.core import graph_memory
from deepinfer.core.config import EngineConfig
from deepinfer.core.environment import read_variables
from deepinfer.core.errors import ConfigError
from deepinfer.core.graph_memory import GraphMemory, Place
from deepinfer.core.graph_sizes import GraphKey, GraphSizes, default_sizes
from deepinfer.ops.host import HostRuntime

WIDE = {"max_graph_rows": 512, "max_rows": 2048, "max_seqs": 256, "num_drafts": 0, "max_len": 10000}


def test_default_sizes_are_those_of_the_field():
    assert default_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert default_sizes(300)[-5:] == [248, 256, 272, 288, 300]
    assert default_sizes(1) == [1]


def test_a_step_gets_the_smallest_shape_that_holds_it():
    sizes = GraphSizes.of((), **WIDE)
    assert sizes.key(1, 1, 1) == GraphKey(1, 1, 4096, False)
    assert sizes.key(5, 5, 4096) == GraphKey(8, 8, 4096, False)
    assert sizes.key(64, 64, 4097) == GraphKey(64, 64, 8192, False)
    assert sizes.key(256, 256, 10000) == GraphKey(256, 256, 10000, False)
    assert sizes.key(257, 257, 1) is None and sizes.key(1, 1, 10001) is None


def test_drafts_round_rows_and_sequences_apart():
    sizes = GraphSizes.of((), **{**WIDE, "max_seqs": 8, "num_drafts": 5})
    assert sizes.seqs == (1, 2, 4, 8) and sizes.rows[-1] == 48
    assert sizes.key(17, 3, 1) == GraphKey(24, 4, 4096, True)
    assert sizes.key(3, 3, 1) == GraphKey(4, 4, 4096, False)
    assert sizes.key(4, 3, 1) == GraphKey(4, 4, 4096, True)  # another graph than that of four rows without drafts


@pytest.mark.parametrize("drafts", [0, 1, 5])
@pytest.mark.parametrize("given", [(), (3,), (64,), (2, 5, 7, 1000)])
def test_no_padding_is_larger_than_the_largest_step(given, drafts):
    """Ops have scratch for `max_rows`, drafts for `max_seqs`."""
    sizes = GraphSizes.of(given, max_graph_rows=40, max_rows=12, max_seqs=7, num_drafts=drafts, max_len=50)
    for seqs in range(1, 8):
        for rows in range(seqs, min(seqs * (1 + drafts), 12) + 1):
            key = sizes.key(rows, seqs, 50)
            if key is not None:
                assert rows <= key.rows <= 12 and seqs <= key.seqs <= 7 and key.context == 50
                assert key.verifies == (rows > seqs) and (key.verifies or key.rows == key.seqs)


def test_row_counts_above_the_limit_are_left_out():
    assert GraphSizes.of((4, 600), **WIDE).rows == (4,)
    assert GraphSizes.of((600,), **WIDE).rows == ()


def addresses(memory, *shapes):
    return [memory.new(shape, torch.float32).data_ptr() for shape in shapes]


def test_the_same_calls_from_the_same_place_get_the_same_memory():
    memory = GraphMemory(HostRuntime())
    first = addresses(memory, (3, 4), (3, 4), (0, 7), (5,))
    assert len(set(first)) == 4 and all(address % 64 == first[0] % 64 for address in first)
    behind = memory.place
    later = addresses(memory, (9,))
    memory.begin(Place())
    assert addresses(memory, (3, 4), (3, 4), (0, 7), (5,)) == first and memory.place == behind
    assert addresses(memory, (9,)) == later and later[0] not in first


def test_shapes_share_memory_whatever_they_are(monkeypatch):
    monkeypatch.setattr(graph_memory, "_CHUNK", 1 << 12)
    memory = GraphMemory(HostRuntime())
    large = addresses(memory, (1000,), (900,), (5000,))
    taken = memory.num_bytes
    memory.begin(Place())
    assert addresses(memory, (10, 10))[0] == large[0]
    assert memory.num_bytes == taken == 2 * (1 << 12) + 5000 * 4 // 256 * 256 + 256


def test_what_is_beyond_the_limit_is_not_kept_and_marked(monkeypatch):
    monkeypatch.setattr(graph_memory, "_CHUNK", 1 << 12)
    memory = GraphMemory(HostRuntime(), limit_bytes=1 << 13)
    memory.new((1000,), torch.float32)
    assert not memory.has_overflowed
    beyond = memory.new((2000,), torch.float32)
    assert memory.has_overflowed and beyond.shape == (2000,) and memory.num_bytes == 1 << 12


class SplittingRuntime(HostRuntime):
    """Host memory of which parts can be told apart."""

    def alone(self, tensor):
        return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))


def test_memory_of_results_that_nobody_holds_is_used_again_within_a_piece():
    memory = GraphMemory(SplittingRuntime())
    first, second, third = (memory.new((64,), torch.float32) for _ in range(3))
    where, end = first.data_ptr(), memory.place
    view = second[3:7]
    del first, second
    assert memory.new((64,), torch.float32).data_ptr() == where  # at once, its result is not kept here
    assert memory.new((32,), torch.int64).data_ptr() == where
    assert memory.place == end
    larger = memory.new((65,), torch.float32)
    assert larger.data_ptr() == third.data_ptr() + 256 and memory.place != end
    del view  # the last that held the second result
    assert memory.new((128,), torch.float32).data_ptr() == where  # both places together


def test_results_of_another_piece_are_not_used_again():
    memory = GraphMemory(SplittingRuntime())
    first, inside = memory.new((64,), torch.float32), memory.new((64,), torch.float32)
    behind = memory.place
    memory.begin(behind)
    where = first.data_ptr()
    del first
    assert memory.new((64,), torch.float32).data_ptr() not in (where, inside.data_ptr())


def test_a_larger_place_is_split_and_joined_again():
    memory = GraphMemory(SplittingRuntime())
    sizes = (64, 192, 64)
    held = [memory.new((size,), torch.float32) for size in sizes]
    addresses, end = [tensor.data_ptr() for tensor in held], memory.place
    for order in itertools.permutations(range(3)):
        for index in order:
            held[index] = None
        parts = [memory.new((64,), torch.float32) for _ in range(5)]
        assert [part.data_ptr() for part in parts] == [addresses[0] + 256 * i for i in range(5)]
        del parts
        held = [memory.new((size,), torch.float32) for size in sizes]
        assert [tensor.data_ptr() for tensor in held] == addresses and memory.place == end


@pytest.mark.parametrize("bad", [(0,), (4, -1), (2.5,), 8, ("4",), (True,)])
def test_row_counts_are_integers(bad):
    with pytest.raises(ConfigError, match="graph_batch_sizes must be integers of at least 1"):
        EngineConfig(graph_batch_sizes=bad)


def test_settings_from_files_and_variables():
    assert EngineConfig(graph_batch_sizes=[4, 8]).graph_batch_sizes == (4, 8)
    given = {"DEEPINFER_GRAPHS": "false", "DEEPINFER_GRAPH_BATCH_SIZES": "1, 2,8", "DEEPINFER_MAX_GRAPH_ROWS": "64"}
    config = EngineConfig.load(environ=given)
    assert (config.graphs, config.graph_batch_sizes, config.max_graph_rows) == (False, (1, 2, 8), 64)
    theirs = {"DEEPINFER_ENFORCE_EAGER": "1", "DEEPINFER_CUDAGRAPH_BATCH_SIZE_INTERVAL": "128"}
    config = EngineConfig.load(environ=theirs)
    assert not config.graphs and config.graph_batch_sizes == (128, 256, 384, 512)
    for text in ("0", "four", "-8"):
        with pytest.raises(ConfigError, match="graph_batch_sizes"):
            EngineConfig.load(environ={"DEEPINFER_CUDAGRAPH_BATCH_SIZE_INTERVAL": text})


def test_nothing_of_drafts_alone_can_be_set():
    with pytest.warns(UserWarning, match="drafting is captured with the step that it stands behind"):
        assert read_variables({"DEEPINFER_DFLASH_ENFORCE_EAGER": "1"}, {}) == {}
