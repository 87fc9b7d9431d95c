"""The fake device is hard: each thing that breaks on real hardware is an error here, and it names the culprit."""

import numpy as np
import pytest
import torch

from deepinfer.backends.fake.errors import (
    HostAccessError,
    UnwrittenReadError,
    UseAfterFreeError,
)
from deepinfer.backends.fake.runtime import FakeRuntime
from deepinfer.ops.backend import BindContext
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.errors import (
    OpArgumentError,
    OutOfDeviceMemoryError,
)
from deepinfer.ops.formats import QTensor
from deepinfer.ops.heads import gather_rows
from deepinfer.ops.index import index_logits_ragged, visible_lens
from deepinfer.ops.kv import copy_blocks
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.quant import quantize
from deepinfer.ops.registry import OpTable, find_backend
from deepinfer.ops.runtime import Event, Runtime
from deepinfer.ops.step import shift


def fake(seed=0, **options):
    """A runtime and a function that binds ops to it."""
    runtime = FakeRuntime(seed, **options)
    table = OpTable(find_backend("fake"), BindContext(runtime.device, runtime), strict=True, overrides={})
    return runtime, table.bind


def ids(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def device():
    return fake()


def test_it_is_a_runtime_and_never_chosen_unasked(device):
    runtime, _ = device
    assert isinstance(runtime, Runtime) and isinstance(runtime.event(), Event)
    assert runtime.capabilities.asynchronous and not runtime.capabilities.unified_memory
    assert find_backend("auto").name != "fake"
    assert {i.op.name for i in find_backend("fake").implementations} == set(defined_ops())


# Host access


HOST_ACCESS = {
    "numpy": lambda x: x.numpy(),
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[0, 0].item(),
    "__int__": lambda x: int(x[0, 0]),
    "__float__": lambda x: float(x[0, 0]),
    "__bool__": lambda x: bool(x[0, 0]),
    "__index__": lambda x: [1, 2][x[0, 0]],
    "print": lambda x: print(x),
    "__format__": lambda x: f"{x}",
    "__array__": lambda x: np.asarray(x),
    "__dlpack__": lambda x: x.__dlpack__(),
    "data_ptr": lambda x: x.data_ptr(),
    "cpu": lambda x: x.cpu(),
    "add": lambda x: x + 1,
    "__eq__": lambda x: x == x,
    "mul": lambda x: torch.ones(3) * x,
    "cat": lambda x: torch.cat((x, x)),
    "float": lambda x: x.float(),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "new_zeros": lambda x: x.new_zeros(3),
    "empty_like": lambda x: torch.empty_like(x),
    "copy_": lambda x: torch.zeros(4, 6).copy_(x),
    "__getitem__": lambda x: x[[1, 2]],
    "a mask __getitem__": lambda x: x[torch.tensor([True, False, True, False])],
    "__setitem__": lambda x: x.__setitem__(0, 1),
    "deepcopy": lambda x: __import__("copy").deepcopy(x),
    "__reduce_ex__": lambda x: __import__("pickle").dumps(x),
    "reshape": lambda x: x.T.reshape(24),
}


@pytest.mark.parametrize("what", HOST_ACCESS)
@pytest.mark.parametrize("inference", [False, True])
def test_host_access_raises_and_names_the_call(device, what, inference):
    x = device[0].to_device(torch.ones(4, 6, dtype=torch.float64))
    with torch.inference_mode(inference), pytest.raises(HostAccessError) as caught:
        HOST_ACCESS[what](x)
    assert what.split()[-1] in str(caught.value)


def test_torch_cannot_make_tensors_there(device):
    with pytest.raises(Exception, match="privateuseone"):
        torch.zeros(2, device=device[0].device)


def test_an_op_refuses_host_tensors(device):
    runtime, bind = device
    with pytest.raises(HostAccessError, match=r"op rms_norm.*argument weight is a tensor on cpu"):
        bind(rms_norm)(runtime.to_device(torch.ones(1, 4)), torch.ones(4), 1e-6)


VIEWS = {
    "select": lambda x: x[1],
    "negative": lambda x: x[-1, 2:],
    "slice": lambda x: x[1:3, ::2],
    "numpy int": lambda x: x[np.int64(1)],
    "new axis": lambda x: x[:, None, ..., 0],
    "split": lambda x: x.split((1, 3))[1],
    "chunk": lambda x: x.chunk(2, dim=1)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "iterate": lambda x: list(x)[3],
    "view": lambda x: x.view(2, 12),
    "bits": lambda x: x.view(torch.int32),
    "reshape": lambda x: x.reshape(-1),
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "transpose": lambda x: x.transpose(0, 1),
    "T": lambda x: x.T[1:],
    "expand": lambda x: x[:1].expand(5, 6),
    "as_strided": lambda x: x.as_strided((2, 2), (5, 1), 3),
    "unsqueeze": lambda x: torch.unsqueeze(x, 0),
}


@pytest.mark.parametrize("what", VIEWS)
def test_views_share_memory_and_show_the_same_values(device, what):
    runtime, _ = device
    host = torch.arange(24.0).view(4, 6)
    x = runtime.to_device(host)
    free = runtime.memory_info().free_bytes
    got, want = VIEWS[what](x), VIEWS[what](host)
    assert runtime.memory_info().free_bytes == free
    assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
    del x  # a view keeps the memory
    assert torch.equal(runtime.to_host(got), want)


def test_writes_show_through_views(device):
    runtime, bind = device
    pool = runtime.zeros((4, 8), torch.uint8)
    head = pool[:, :3]
    source = runtime.to_device(torch.full((4, 8), 7, dtype=torch.uint8))
    assert source.is_contiguous() and len(source) == 4 and "FakeTensor(shape=(4, 8)" in repr(source)
    bind(copy_blocks)(head, runtime.to_device(ids(0)), runtime.to_device(ids(2)))
    bind(copy_blocks)(source, runtime.to_device(ids(0)), runtime.to_device(ids(2)))
    assert runtime.to_host(pool).eq(0).all() and runtime.to_host(source).eq(7).all()


# Ops


def test_results_have_the_bits_of_the_cpu(device):
    runtime, bind = device
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    host = OpTable(find_backend("cpu"), BindContext(torch.device("cpu"), find_backend("cpu").runtime()), overrides={})
    want = host.bind(quantize)(x, "mxfp8")
    got = bind(quantize)(runtime.to_device(x), "mxfp8")
    assert isinstance(got, QTensor) and got.fmt == "mxfp8"
    assert torch.equal(runtime.to_host(got.data), want.data) and torch.equal(runtime.to_host(got.scale), want.scale)


def test_a_size_that_depends_on_values_makes_the_host_wait(device):
    runtime, bind = device
    bound = bind(index_logits_ragged)
    assert not bound.plan.capturable and bind(rms_norm).plan.capturable
    send = runtime.to_device
    q, k, w = torch.ones(2, 1, 32), torch.ones(4, 32), torch.ones(2, 1)
    got = bound(send(q), send(k), send(w), send(ids(0, 1)), send(ids(2, 4)))
    assert got.shape == (2, 3)
    assert torch.equal(runtime.to_host(got), index_logits_ragged(q, k, w, ids(0, 1), ids(2, 4)))


def test_an_op_without_declared_shapes_works_too(device, monkeypatch):
    runtime, bind = device
    monkeypatch.setitem(visible_lens.__dict__, "results", None)
    assert not bind(visible_lens).capturable
    got = bind(visible_lens)(runtime.to_device(ids(0, 1, 2, 3)), 2)
    assert runtime.to_host(got).tolist() == [0, 1, 1, 2]


def test_a_plan_writes_where_it_is_told(device):
    runtime, bind = device
    out = runtime.empty((2,), torch.int32)
    got = bind(shift).plan.run(runtime.to_device(ids(1, 2)), 5, out=out, scratch=runtime.empty((0,), torch.uint8))
    assert got is out and runtime.to_host(out).tolist() == [6, 7]
    bind(shift).plan.run(runtime.to_device(ids(1, 2, 3)), 5, out=out)
    with pytest.raises(OpArgumentError, match="shift returned"):
        runtime.synchronize()


def test_an_error_of_an_op_comes_with_the_next_wait_and_once(device):
    runtime, bind = device
    bad = runtime.to_device(torch.ones(2, 3)), runtime.to_device(ids(0, 9))
    bind(gather_rows)(*bad)
    with pytest.raises(Exception, match="out of range") as caught:
        runtime.synchronize()
    assert "gather_rows" in caught.value.__notes__[0]
    runtime.synchronize()
    assert runtime.to_host(runtime.zeros((1,), torch.int32)).tolist() == [0]


# Memory


def test_new_memory_is_poison_and_reading_it_is_found():
    runtime, _ = fake()
    with pytest.raises(UnwrittenReadError, match=r"to_host read float32\[3\]"):
        runtime.to_host(runtime.empty((3,), torch.float32))
    loose, _ = fake(detect=False)
    assert loose.to_host(loose.empty((3,), torch.bfloat16)).isnan().all()
    assert loose.to_host(loose.empty((3,), torch.int32)).tolist() == [-1] * 3
    assert loose.to_host(loose.zeros((3,), torch.int32)).tolist() == [0] * 3


def test_freed_memory_is_poisoned_and_its_address_used_again():
    runtime, _ = fake(detect=False)
    first = runtime.to_device(torch.ones(8))
    address = repr(first).split("at=")[1]
    del first
    runtime.synchronize()
    second = runtime.empty((8,), torch.float32)
    assert repr(second).split("at=")[1] == address
    assert runtime.to_host(second).isnan().all()


def planted_use_after_free(runtime, bind):
    """A tensor is used on a second stream and dropped; nothing makes its own stream wait for that use."""
    x = runtime.to_device(ids(1, 2, 3))
    runtime.synchronize()
    side = runtime.stream()
    with runtime.use_stream(side):
        made = bind(shift)(x, 1)
    del x
    return side, made


def outcome_of_use_after_free(seed, **options):
    runtime, bind = fake(seed, **options)
    side, made = planted_use_after_free(runtime, bind)
    runtime.memory_info()  # the free is queued
    with runtime.use_stream(side):
        return runtime.to_host(made).tolist()


def test_use_after_free_on_another_stream_is_found_in_some_order():
    found = 0
    for seed in range(24):
        try:
            assert outcome_of_use_after_free(seed) == [2, 3, 4]
        except UseAfterFreeError as error:
            assert "shift used int32[3]" in str(error)
            found += 1
    assert 0 < found < 24


def test_without_detection_use_after_free_reads_poison():
    outcomes = {tuple(outcome_of_use_after_free(seed, detect=False)) for seed in range(24)}
    assert outcomes == {(2, 3, 4), (0, 0, 0)}  # -1 + 1


def test_memory_is_free_only_when_the_queue_has_passed(device):
    runtime, bind = device
    whole = runtime.memory_info().free_bytes
    x = runtime.zeros((1 << 16,), torch.uint8)
    y = bind(gather_rows)(x, runtime.to_device(ids(0)))
    used = runtime.memory_info().free_bytes
    del x
    assert runtime.memory_info().free_bytes == used < whole - (1 << 16) + 1
    runtime.synchronize()
    assert runtime.memory_info().free_bytes >= whole - 512
    del y


def test_memory_has_a_limit_and_waits_for_frees_before_it_refuses():
    runtime, _ = fake(memory_bytes=1 << 20)
    assert runtime.memory_info().total_bytes == 1 << 20
    held = runtime.zeros((3 << 18,), torch.uint8)
    with pytest.raises(OutOfDeviceMemoryError, match=r"uint8\[524288\]: 524288 bytes do not fit"):
        runtime.zeros((1 << 19,), torch.uint8)
    del held
    assert runtime.to_host(runtime.zeros((1 << 19,), torch.uint8)).sum() == 0
