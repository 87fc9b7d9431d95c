"""The mixture of experts with its experts divided among ranks: each token gets the bits that one rank gives it."""

from dataclasses import replace

import pytest
import torch

from deepinfer.models.deepseek_v41_flash.experts import Experts
from deepinfer.models.deepseek_v41_flash.linear import Numerics, Rows
from deepinfer.models.deepseek_v41_flash.step import RowContext
from deepinfer.models.deepseek_v41_flash.weights import MoEWeights
from deepinfer.ops.backend import BindContext
from deepinfer.ops.expert_ranks import ExpertRanks
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.quant import quantize
from deepinfer.ops.registry import OpTable, find_backend
from deepinfer.testing.ranks import run_ranks

EXPERTS, HIDDEN, WIDTH, CHOICES = 8, 64, 32, 3


def weights(fmt):
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    def product(*shape, fmt=fmt):
        return draw(*shape) if fmt is None else quantize(draw(*shape).float(), fmt)

    shared = None if fmt is None else "mxfp8"
    return MoEWeights(
        gate=draw(EXPERTS, HIDDEN),
        bias=torch.randn(EXPERTS, generator=generator) * 0.1,
        bias_vl=torch.zeros(EXPERTS),
        w13=product(EXPERTS, 2 * WIDTH, HIDDEN),
        w2=product(EXPERTS, HIDDEN, WIDTH),
        shared_w13=product(2 * WIDTH, HIDDEN, fmt=shared),
        shared_w2=product(HIDDEN, WIDTH, fmt=shared),
    )


def layer(context, loaded, rounding):
    ops = OpTable(find_backend("cpu"), context, overrides={})
    numerics = Numerics(torch.bfloat16, activation_rounding=rounding, kv_rounding=False)
    return Experts(ops, "layer", loaded, numerics, per_token=CHOICES, scale=1.5, limit=10.0)


def run(experts, x, rounding):
    rows = Rows(x, quantize(x.float(), "mxfp8") if rounding else None)
    return experts(rows, RowContext(positions=torch.zeros(len(x), dtype=torch.int32)))


@pytest.mark.parametrize("even_rows", [0, 8], ids=["counted", "even"])
@pytest.mark.parametrize("fmt", [None, "mxfp4"])
def test_every_token_gets_the_bits_of_one_rank(fmt, even_rows) -> None:
    loaded, rounding = weights(fmt), fmt is not None
    counts = [5, 5] if even_rows else [7, 2]
    x = torch.randn(sum(counts), HIDDEN, generator=torch.Generator().manual_seed(4)).bfloat16()
    own = x.split(counts)

    def program(runtime, group):
        ranks = ExpertRanks(group, even_rows)
        share = slice(ranks.share(EXPERTS).start, ranks.share(EXPERTS).stop)
        mine = replace(loaded, w13=loaded.w13[share], w2=loaded.w2[share])
        context = BindContext(runtime.device, runtime, expert_ranks=ranks)
        return run(layer(context, mine, rounding), own[group.rank], rounding)

    got = run_ranks([HostRuntime() for _ in counts], program)
    runtime = HostRuntime()
    want = run(layer(BindContext(runtime.device, runtime), loaded, rounding), x, rounding)
    assert torch.equal(torch.cat(got), want)
