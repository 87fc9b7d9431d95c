"""CUDA C++ compiles for Hopper without a GPU, keeps its values in registers, and has the instructions it is made of."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="brings the tools that read machine code")
pytest.importorskip("cuda.core")
pytest.importorskip("cuda.bindings.nvrtc")

from deepinfer.backends.cuda_sm90 import attention_forms, products
from deepinfer.backends.cuda_sm90.attention_forms import Form, Pages
from deepinfer.backends.cuda_sm90.plain_products import PlainForm
from deepinfer.backends.nvidia.ahead import CUOBJDUMP, resource_usage
from deepinfer.backends.nvidia.nvrtc import CudaProgram
from deepinfer.ops.errors import DeviceError

SHARED_OF_MULTIPROCESSOR = 228 << 10
SHARED_OF_BLOCK = 227 << 10
REGISTERS = 65536
ATTENTION_STACK = 8
"""Bytes outside registers that the attention kernel has: an address taken, no value of its loops."""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))


def instructions(code: bytes, folder: Path) -> str:
    file = folder / "kernel.cubin"
    file.write_bytes(code)
    return subprocess.run([CUOBJDUMP, "--dump-sass", file], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("experts", [0, 384])
@pytest.mark.parametrize("tokens", [8, 64, 144, 192])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_stay_in_registers(bits: int, tokens: int, experts: int, tmp_path: Path) -> None:
    form = products.Form(bits, tokens, groups=2, wide=False, experts=experts)
    code = form.program().compile("sm_90a")
    registers, local_bytes = resource_usage(code)
    assert local_bytes == 0
    threads = 128 * form.groups + 32
    assert registers * threads * form.resident <= REGISTERS
    text = instructions(code, tmp_path)
    many = tokens > 96
    widths = 5 if many and experts else 1
    assert [f"HGMMA.64x{tokens - 8 * i}x16.F32.BF16" in text for i in range(6)] == [True] * widths + [False] * (
        6 - widths
    )
    assert "UBLKCP" in text and "UTMALDG.2D" in text
    assert text.count("WARPGROUP.DEPBAR") == 3  # two in the loop, one behind a tile; none behind each MMA


@pytest.mark.parametrize(("tokens", "eight"), [(8, True), (16, True), (24, False), (144, False)])
def test_products_with_the_narrow_packing_stay_in_registers(tokens: int, eight: bool, tmp_path: Path) -> None:
    form = products.Form(4, tokens, groups=2, wide=False, experts=384, narrow=True, eight=eight)
    code = form.program().compile("sm_90a")
    registers, local_bytes = resource_usage(code)
    assert local_bytes == 0
    assert registers * (128 * form.groups + 32) * form.resident <= REGISTERS
    assert form.stages >= 2
    assert (form.shared_bytes + 1024) * form.resident <= SHARED_OF_MULTIPROCESSOR
    kind = f"QGMMA.64x{tokens}x32.F32.E4M3.E4M3" if eight else f"HGMMA.64x{tokens}x16.F32.BF16"
    assert kind in instructions(code, tmp_path)


@pytest.mark.parametrize("tokens", [8, 64])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_over_parts_of_k(bits: int, tokens: int, tmp_path: Path) -> None:
    form = products.Form(bits, tokens, groups=1, wide=False, split=3)
    code = form.program().compile("sm_90a")
    registers, local_bytes = resource_usage(code)
    assert registers * 160 * form.resident <= REGISTERS
    assert local_bytes == 0
    assert (form.shared_bytes + 1024) * form.resident <= SHARED_OF_MULTIPROCESSOR
    text = instructions(code, tmp_path)
    assert "UCGABAR_WAIT" in text  # blocks of a cluster meet
    assert text.count("WARPGROUP.DEPBAR") == 3  # two in the loop, one behind a tile; none behind each MMA


@pytest.mark.parametrize(
    ("tokens", "groups", "cluster"), [(8, 1, True), (128, 1, True), (144, 1, False), (192, 1, False), (192, 2, False)]
)
def test_plain_products(tokens: int, groups: int, cluster: bool, tmp_path: Path) -> None:
    form = PlainForm(tokens, groups, wide=True, split=8, cluster=cluster)
    code = form.program().compile("sm_90a")
    registers, local_bytes = resource_usage(code)
    assert registers * (128 * groups + 32) * form.resident <= REGISTERS
    assert local_bytes <= (4 * tokens // 2 if (tokens, groups) == (192, 2) else 0)  # sums of the parts of K before
    assert form.stages >= 2
    assert (form.shared_bytes + 1024) * form.resident <= SHARED_OF_MULTIPROCESSOR
    text = instructions(code, tmp_path)
    assert 2 * text.count("WARPGROUP.DEPBAR") < text.count(f"HGMMA.64x{tokens}x16.F32.BF16")  # none behind each MMA


@pytest.mark.parametrize(
    ("rows", "blocks", "parts"),
    [(32768, 10, 1), (16896, 10, 1), (8192, 32, 2), (5120, 64, 2), (4608, 40, 3), (1792, 40, 8), (128, 4, 4)],
)
def test_parts_of_k_depend_on_the_matrix(rows: int, blocks: int, parts: int) -> None:
    assert products.split_of(rows, blocks) == parts


@pytest.mark.parametrize(
    ("bits", "tokens", "lone", "ahead"),
    [(4, 16, False, False), (8, 16, False, True), (8, 64, False, False), (8, 64, True, True)],
)
@pytest.mark.parametrize("wide", [False, True])
def test_halves_stay_in_registers(wide: bool, bits: int, tokens: int, lone: bool, ahead: bool, tmp_path: Path) -> None:
    form = products.Form(bits, tokens, groups=1, wide=wide, lone=lone)
    assert form.ahead == ahead
    code = form.program().compile("sm_90a")
    _, local_bytes = resource_usage(code)
    assert local_bytes == 0
    # two in the loop, one or two behind it; none behind each MMA
    assert instructions(code, tmp_path).count("WARPGROUP.DEPBAR") == 3 + ahead


@pytest.mark.parametrize("kv_fp4", [False, True])
@pytest.mark.parametrize("form", Form)
def test_sparse_attention(form: Form, kv_fp4: bool, tmp_path: Path) -> None:
    code = Pages(32, 64, kv_fp4).program(form, 5 if form is Form.PARTS else 0).compile("sm_90a")
    registers, local_bytes = resource_usage(code)
    assert registers * attention_forms.block_threads(form) <= REGISTERS
    assert local_bytes <= ATTENTION_STACK
    assert attention_forms.shared_bytes(form) <= SHARED_OF_BLOCK
    text = instructions(code, tmp_path)
    scores, values, waits = {
        Form.FEW: (64, 64, 2),
        Form.DIRECT: (32, 128, 5),
        Form.GATHERED: (64, 256, 18),  # two groups, of which each has waits for scores and for quarters of two tiles
        Form.PARTS: (64, 128, 2),
    }[form]
    assert text.count(f"HGMMA.64x{scores}x16") >= 32
    assert text.count(f"HGMMA.64x{values}x16") >= 8
    # a wait behind every MMA is what the compiler falls back to where registers do not suffice
    assert text.count("WARPGROUP.DEPBAR") == waits
    assert ("UTMASTG.2D" in text) == (form is Form.GATHERED)
    assert ("UCGABAR_WAIT" in text) == (form in (Form.FEW, Form.PARTS))  # blocks of a cluster meet


@pytest.mark.parametrize("entry", ["mark_slots", "decode_records"])
def test_helpers_of_attention_compile(entry: str) -> None:
    registers, local_bytes = resource_usage(Pages(32, 64, kv_fp4=True).helper(entry).compile("sm_90a"))
    assert registers <= REGISTERS // 1024  # half as many threads as a multiprocessor holds
    assert local_bytes == 0


@pytest.mark.parametrize("tokens", [8, 16, 24, 32, 48, 64, 80, 96, 128, 144, 192])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("groups", [1, 2])
def test_rings_fit_the_multiprocessor(bits: int, tokens: int, groups: int) -> None:
    form = products.Form(bits, tokens, groups, wide=False, experts=products.MOST_EXPERTS)
    assert form.stages >= 2
    assert form.shared_bytes <= SHARED_OF_BLOCK
    assert (form.shared_bytes + 1024) * form.resident <= SHARED_OF_MULTIPROCESSOR


@pytest.mark.parametrize(("rows", "experts", "tokens"), [(1, 1, 8), (64, 1, 64), (200, 1, 128), (8192, 1, 192)])
def test_tiles_of_one_matrix(rows: int, experts: int, tokens: int) -> None:
    assert products.tile_tokens(rows, experts) == tokens


def test_tiles_of_experts_leave_room_for_chance() -> None:
    found = {tokens: products.tile_tokens(6 * tokens, 384) for tokens in (1, 128, 1024, 4096, 8192, 16384)}
    assert found == {1: 8, 128: 8, 1024: 24, 4096: 80, 8192: 144, 16384: 144}


@pytest.mark.parametrize(
    ("rows", "tiles", "records", "form"),
    [
        (1, 10, None, Form.FEW),
        (15, 10, 4096, Form.FEW),
        (15, 12, 4096, Form.DIRECT),  # more keys than a cluster has room for
        (16, 10, 4096, Form.DIRECT),
        (1023, 10, 1 << 20, Form.DIRECT),
        (1024, 10, 1024, Form.GATHERED),
        (1024, 10, 1023, Form.DIRECT),
        (8192, 2, None, Form.DIRECT),
    ],
)
def test_form_of_attention(rows: int, tiles: int, records: int | None, form: Form) -> None:
    room = None if records is None else attention_forms.Room(window_words=1, words=2, records=records)
    assert attention_forms.choose_form(rows, tiles, room) is form


@pytest.mark.parametrize(
    ("window", "kv", "kv_fp4", "tiles"), [(128, 512, True, 10), (128, 0, False, 2), (1, 65, True, 3)]
)
def test_tiles_of_attention(window: int, kv: int, kv_fp4: bool, tiles: int) -> None:
    assert Pages(32, 64, kv_fp4).tiles(window, kv) == tiles


def test_parts_of_rows() -> None:
    pages = Pages(32, 64, kv_fp4=True)
    assert [pages.parts(128, 512), pages.parts(128, 0), pages.parts(65, 129)] == [5, 1, 3]
    assert attention_forms.works_on_parts(44, 5)
    assert not attention_forms.works_on_parts(45, 5)
    assert not attention_forms.works_on_parts(1, 1)  # nothing to divide
    assert not attention_forms.works_on_parts(1, 9)  # more than a cluster has blocks


def test_scratch_of_decoded_records() -> None:
    num_bytes = attention_forms.scratch_bytes(8192)
    assert num_bytes == 256 << 20
    room = attention_forms.divide_scratch(num_bytes, window_slots=65, kv_slots=1000)
    assert (room.window_words, room.words) == (3, 35)
    assert room.cleared_bytes == 16 + 4 * 35
    assert room.records_start % 16 == 0
    assert room.records_start >= room.cleared_bytes + 4 * 35  # places of words lie between
    assert room.records_start + 1024 * room.records <= num_bytes
    assert room.holds_all_slots
    assert not attention_forms.divide_scratch(num_bytes, window_slots=65, kv_slots=1 << 18).holds_all_slots
    assert attention_forms.scratch_bytes(1023) == 0
    assert attention_forms.divide_scratch(4096, window_slots=1 << 20, kv_slots=1 << 20).records == 0


def test_what_does_not_compile_says_why() -> None:
    program = products.Form(8, 8, groups=2, wide=False).program()
    broken = CudaProgram(program.files, program.entry, dict(program.macros, TOKENS="nothing"), program.generated)
    with pytest.raises(DeviceError, match=r"products\.cu does not compile for sm_90a"):
        broken.compile("sm_90a")


def test_a_folder_that_takes_no_files_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(blocked))
    program = Pages(32, 64, kv_fp4=True).helper("mark_slots")
    assert program.compile("sm_90a") == program.compile("sm_90a")
    (said,) = (record.getMessage() for record in caplog.records)
    assert "compiled kernels are not kept in" in said and str(blocked) in said
