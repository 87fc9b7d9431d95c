"""Block-scaled products: every tile they are launched with has the instruction it is for, and stays in registers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernel_launches import backend_of

from deepinfer.backends.nvidia.ahead import compile_ahead
from deepinfer.backends.nvidia.launch import Launch, recording
from deepinfer.ops.formats import QTensor, QuantFormat
from deepinfer.ops.linear import linear_mx as linear_mx_op
from deepinfer.ops.moe import moe_grouped_gemm as moe_grouped_gemm_op

SHARED_OF_BLOCK = 227 << 10


def _codes(*shape: int, fmt: QuantFormat) -> QTensor:
    *rows, width = shape
    data = torch.zeros(*rows, width // (1 if fmt == "mxfp8" else 2), dtype=torch.uint8)
    return QTensor(data, torch.zeros(*rows, -(-width // 32), dtype=torch.uint8), fmt)


def _dense(rows: int, outputs: int, depth: int, fmt: QuantFormat) -> Launch:
    from deepinfer.backends.cuda_sm100.linear import linear_mx

    with recording() as launches:
        linear_mx(_codes(rows, depth, fmt="mxfp8"), _codes(outputs, depth, fmt=fmt), torch.bfloat16)
    (launch,) = launches
    return launch


@pytest.mark.parametrize("capability", [100, 103])
@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("rows", [1, 17, 64, 8192])
def test_tiles_have_one_block_scaled_instruction(rows: int, fmt: QuantFormat, capability: int) -> None:
    launch = _dense(rows, 256, 1280, fmt)
    made = compile_ahead(launch, capability)
    assert made.matrix_instructions() == {"UTCQMMA"}
    assert made.asynchronous_kinds() == {"kind::mxf8f6f4.block_scale"}
    assert made.stack_bytes == 0
    assert made.shared_bytes <= SHARED_OF_BLOCK
    assert "LDGSTS" in made.instructions()  # codes go to shared memory past the registers


@pytest.mark.parametrize(
    ("depth", "outputs", "codes", "scales"), [(5120, 1792, 16, 4), (288, 5120, 16, 1), (2304, 64, 16, 4), (40, 7, 1, 1)]
)
def test_loads_are_wide_where_rows_allow_it(depth: int, outputs: int, codes: int, scales: int) -> None:
    constants = _dense(8, outputs, depth, "mxfp4").constants
    assert (constants["VEC"], constants["SCALE_VEC"]) == (codes, scales)


def test_depth_and_outputs_of_a_tile_do_not_depend_on_rows() -> None:
    """They fix the order in which a row is summed, and a row has the same bits in any batch."""
    tiles = [_dense(rows, 512, 1280, "mxfp4").constants for rows in (1, 16, 100, 9000)]
    assert {(tile["BN"], tile["BK"]) for tile in tiles} == {(128, 128)}
    assert [tile["BM"] for tile in tiles] == [16, 16, 128, 128]


def test_what_is_not_mxfp8_takes_the_decoded_form() -> None:
    from deepinfer.backends.cuda_sm100.linear import linear_mx, moe_grouped_gemm

    plain = torch.zeros(4, 64, dtype=torch.bfloat16)
    with recording() as launches:
        linear_mx(plain, _codes(32, 64, fmt="mxfp4"), torch.bfloat16)
        moe_grouped_gemm(plain, _codes(2, 32, 64, fmt="mxfp4"), torch.tensor([1, 4], dtype=torch.int32), torch.float32)
        moe_grouped_gemm(
            _codes(4, 64, fmt="mxfp8"),
            _codes(2, 32, 64, fmt="mxfp4"),
            torch.tensor([1, 4], dtype=torch.int32),
            torch.float32,
        )
    assert [launch.kernel.jit.__name__ for launch in launches] == ["dense", "grouped", "grouped_scaled"]


def test_the_table_chooses_them() -> None:
    dims = {"n": 256, "k": 384, "weight": "mxfp4", "x": "mxfp8", "experts": 4}
    for op, name in ((linear_mx_op, "linear_mx_scaled"), (moe_grouped_gemm_op, "moe_grouped_gemm_scaled")):
        fitting = [i for i in backend_of(100).implementations if i.op == op and i.when(dims)]
        assert max(fitting, key=lambda i: i.priority).name == f"cuda_sm100.{name}"
        others = [i for i in backend_of(100).implementations if i.op == op and i.when({**dims, "weight": "nvfp4"})]
        assert f"cuda_sm100.{name}" not in [i.name for i in others]
