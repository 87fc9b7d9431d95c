"""Forms that many rows take, on few of them in Triton's interpreter; run as a program, fails by raising."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor

from deepinfer.ops.engram import engram_gate
from deepinfer.ops.formats import QTensor
from deepinfer.ops.moe import ep_dispatch
from deepinfer.ops.quant import quantize
from deepinfer.ops.registry import find_emulated
from deepinfer.ops.trees import tensors_of


def main() -> None:
    """Dispatch that counts choices first, and gates of several rows a program."""
    find_emulated("cuda_sm90")  # before any kernel is imported
    from deepinfer.backends.nvidia import engram, moe

    gen = torch.Generator().manual_seed(0)
    with changed(moe, _SCANNED_WHOLE=0, _SCAN=16):
        for tokens, k, experts in ((1, 3, 9), (23, 3, 9), (40, 1, 5), (9, 6, 40), (3, 20, 24)):
            for quantised in (False, True):
                check_dispatch(moe, gen, tokens, k, experts, quantised=quantised)
    check_gate(engram, gen)


@contextmanager
def changed(module: ModuleType, **constants: int) -> Iterator[None]:
    """Other constants of a module for a while."""
    before = {name: getattr(module, name) for name in constants}
    vars(module).update(constants)
    try:
        yield
    finally:
        vars(module).update(before)


def check_dispatch(
    moe: ModuleType, gen: torch.Generator, tokens: int, k: int, experts: int, *, quantised: bool
) -> None:
    """Everything but rows behind the last end is the reference's."""
    ids = torch.rand(tokens, experts, generator=gen).topk(k, 1).indices
    ids[torch.rand(tokens, k, generator=gen) < 0.2] = -1
    plain = torch.randn(tokens, 64, generator=gen)
    x: Tensor | QTensor = quantize(plain, "mxfp8") if quantised else plain.bfloat16()
    args = x, ids, torch.rand(tokens, k, generator=gen), experts
    rows, weights, psum, handle = moe.ep_dispatch(*args)
    wanted_rows, wanted_weights, wanted_psum, wanted_handle = ep_dispatch(*args)
    assert torch.equal(psum, wanted_psum)
    assert torch.equal(handle.slot_to_row, wanted_handle.slot_to_row)
    count = int(psum[-1])
    assert torch.equal(weights[:count], wanted_weights[:count])
    for found, wanted in zip(tensors_of(rows), tensors_of(wanted_rows), strict=True):
        assert torch.equal(found[:count], wanted[:count])


def check_gate(engram: ModuleType, gen: torch.Generator) -> None:
    """A row has the bits that it has alone, whatever number of rows a program takes, the last one of fewer too."""
    rows, streams, hidden = 11, 2, 40
    h, kv = torch.randn(rows, streams, hidden, generator=gen), torch.randn(rows, 3 * hidden, generator=gen)
    weights = torch.rand(2, streams, hidden, generator=gen)
    blocked = torch.arange(rows) % 4 == 1
    with changed(engram, _GATED_ALONE=2):
        found = engram.engram_gate(h, kv, *weights, 1e-6, blocked)
    alone = [engram.engram_gate(h[i : i + 1], kv[i : i + 1], *weights, 1e-6, blocked[i : i + 1]) for i in range(rows)]
    assert torch.equal(found, torch.cat(alone))
    torch.testing.assert_close(found, engram_gate(h, kv, *weights, 1e-6, blocked), rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    main()
