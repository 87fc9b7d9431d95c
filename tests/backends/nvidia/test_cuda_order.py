"""Barriers of CUDA C++: one that is left out is found. That none is missing is part of every test of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the fallback of these kernels")

import test_cuda_attention as of_attention
import test_cuda_cuts as of_cuts
import test_cuda_mhc as of_mhc
import test_cuda_mix as of_mix
import test_cuda_products as of_products
import test_cuda_scores as of_scores
import test_cuda_topk as of_topk
from cpu_programs import Fault, noted, on_cpu

from deepinfer.backends.cuda_sm90 import cuts, mix, plain_products, scores, selection
from deepinfer.backends.cuda_sm90.attention_forms import Form
from deepinfer.backends.cuda_sm90.linear import linear_mx
from deepinfer.backends.cuda_sm90.packing import pack

Run = Callable[[Path], None]


def of_row_cuts(folder: Path) -> None:
    filters = of_cuts.filters_of(of_cuts.PROFILES[1:3])
    of_cuts.find(on_cpu(cuts.program(2), folder), 2, of_cuts.dressed("ties", 2, 2050), filters)


def of_selection(folder: Path) -> None:
    x, lens = of_topk.rows_of("plain", 1, 9001), torch.tensor([9001], dtype=torch.int32)
    of_topk.choose(on_cpu(selection.program(False, 2), folder), x, 512, lens, 2)


def of_logits_of_few(folder: Path) -> None:
    of_mix.logits(mix.FEW, *of_mix.operands(9), 1, folder)


def of_step(folder: Path) -> None:
    args = of_mhc.operands(33)
    of_mhc.step(args, of_mhc.split(args["fn"], folder), 1, folder, (16, 16))


def of_index_scores(folder: Path) -> None:
    q, cache, weights, visible, table, row_to_seq = of_scores.stored(5, 4, True)
    form = scores.Form("paged", 64, rows=4)
    pages = of_scores.from_pages(cache, visible, table, row_to_seq)
    of_scores.score(on_cpu(form.program(), folder), form, q, weights, 301, 1024, **pages)


def of_split_product(folder: Path) -> None:
    x, weight = of_products.operands(5, "mxfp8", 128, 256)
    with pytest.MonkeyPatch.context() as patch:
        of_products.Device(folder, patch)
        linear_mx(x, pack(weight), torch.bfloat16, invariant=False)


def of_product(folder: Path) -> None:
    x, weight = of_products.operands(9, "mxfp4", 128, 1024)
    with pytest.MonkeyPatch.context() as patch:
        of_products.Device(folder, patch)
        linear_mx(x, pack(weight), torch.bfloat16)


def of_plain_product(folder: Path) -> None:
    x, weight = torch.ones(5, 256, dtype=torch.bfloat16), torch.ones(128, 256, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        of_products.Device(folder, patch)
        plain_products.linear_bf16(x, weight, torch.float32)


def of_attention_form(form: Form) -> Run:
    def run(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            attend = of_attention.attention_on_cpu(folder, patch)
            attend(form, of_attention.arguments(2, 70, 100, "fp4"))

    return run


FAULTS = {
    "writes to blocks that may not have begun": (
        of_row_cuts,
        Fault("cuts.cu", "  wait_for_blocks();\n"),
        "before its block has begun",
    ),
    "reads what other blocks are still sending": (
        of_selection,
        Fault("topk.cu", "  }\n  cluster_meets();\n", "  }\n"),
        "read after write: topk.cu",
    ),
    "ends while others write to it": (
        of_selection,
        Fault("topk.cu", "  }\n  cluster_meets();\n", "  }\n"),
        "its block may end before",
    ),
    "waits for who does not come": (
        of_row_cuts,
        Fault("cuts.cu", "  wait_for_blocks();\n", "  if (threadIdx.x != 5) __syncthreads();\n  wait_for_blocks();\n"),
        "nobody can go on",
    ),
    "shows to bulk copies what it writes afterwards": (
        of_logits_of_few,
        Fault(
            "mix.cu",
            "    lay_out(own + kSentBytes, sums, 1, 0, 8);\n    fence_async_units();\n",
            "    fence_async_units();\n    lay_out(own + kSentBytes, sums, 1, 0, 8);\n",
        ),
        "no fence before an asynchronous unit: mix.cu",
    ),
    "starts copies before others see the barrier": (
        of_logits_of_few,
        Fault("mix.cu", "    barrier_init_done();\n"),
        "before its barrier is made",
    ),
    "ends while others fetch its sums": (
        of_logits_of_few,
        Fault("mix.cu", "    wait_until_ready();  // what this block sent has come\n"),
        "its block may end before",
    ),
    "adds up bits that others may not have set": (
        of_attention_form(Form.GATHERED),
        Fault("gather_records.cu", "  if (gathers) {\n    __syncthreads();\n", "  if (gathers) {\n"),
        "read after write",
    ),
    "copies in bulk what was written without a fence": (
        of_logits_of_few,
        Fault(
            "mix.cu", "    fence_async_units();\n    __syncwarp();\n    wait_until", "    __syncwarp();\n    wait_until"
        ),
        "no fence before an asynchronous unit: mix.cu",
    ),
    "reads what other lanes copied": (
        of_index_scores,
        Fault("index_scores.cu", "      __syncwarp();  // lanes read", "      // lanes read"),
        "read after write",
    ),
    "copies over a matrix that is still multiplied": (
        of_step,
        Fault("mhc_step.cu", "      mixers_meet();  // all have left that part of the matrix\n"),
        "write after read",
    ),
    "stores sums over tokens that other warps multiply": (
        of_split_product,
        Fault("products.cu", '    asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");\n'),
        "write after read",
    ),
    "stores sums over tokens of a plain product": (
        of_plain_product,
        Fault("plain_products.cu", '    asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");\n'),
        "write after read",
    ),
    "frees a stage before its products are done": (
        of_product,
        Fault("products.cu", "        mma_wait_all_but_newest();     // a[c] is free", "        // a[c] is free"),
        "write after read",
    ),
    "multiplies keys without a fence": (
        of_attention_form(Form.DIRECT),
        Fault(
            "sparse_attn.cu",
            "      fence_async_units();\n      mma_fence();\n      const u64 key_rows",
            "      const u64 key_rows",
        ),
        "no fence before an asynchronous unit",
    ),
    "leaves while others read its sums": (
        of_attention_form(Form.PARTS),
        Fault("sparse_attn_parts.cu", "  blocks_leave();\n"),
        "its block may end before",
    ),
    "stores results over values that are multiplied": (
        of_attention_form(Form.GATHERED),
        Fault("sparse_attn_gathered.cu", "    group_meets(group);"),
        "write after read",
    ),
    "fetches over a tile that is being sent": (
        of_attention_form(Form.FEW),
        Fault("sparse_attn_few.cu", "  if (warp == 15) barrier_wait(parts_full, 0);\n"),
        "write after read",
    ),
}
"""What a kernel would do, where that is run, what is planted for it, and how it is found."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    run, fault, what = FAULTS[name]
    with noted(fault) as notes:
        run(tmp_path)
    found = notes.disorder()
    assert any(pair.startswith(what) for pair in found), found
