"""Pinned text is what its definitions lower to, names what it was made of, and means the same under TileLang's names.

The quick kernels are lowered again on every run; `DEEPINFER_LOWER=all` lowers them all (minutes).
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from deepinfer.backends.ascend950 import generated, twin_build
from deepinfer.backends.ascend950.launch import Program
from deepinfer.backends.ascend950.tiles import lower

ALL = os.environ.get("DEEPINFER_LOWER") == "all"
QUICK = {
    "lists": ("window_index", "slots_of", "draft_rows"),
    "moves": ("move_rows",),
    "shaping": ("penalise", "forbid"),
    "sinkhorn": ("sinkhorn_4",),
}
"""Kernels that lower in less than 3 s each."""

tilelang = pytest.mark.skipif(find_spec("tilelang") is None, reason="lowering needs tilelang, a development extra")


@pytest.mark.parametrize("family", lower.FAMILIES)
def test_text_was_made_from_the_definitions_as_they_are(family: str) -> None:
    assert lower.pinned_hash(family) == lower.definition_hash(family), (
        f"tiles/{family}.py changed: run python -m deepinfer.backends.ascend950.tiles.lower {family}"
    )


def test_every_pinned_file_has_definitions() -> None:
    assert {file.stem for file in lower.TEXTS.glob("*.asc")} == set(lower.FAMILIES)


@tilelang
@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in QUICK.items() for name in names])
def test_lowering_again_gives_the_pinned_text(family: str, name: str) -> None:
    assert lower.lower_kernel(family, name) == lower.pinned_kernels(family)[name]


@tilelang
@pytest.mark.skipif(not ALL, reason="minutes; DEEPINFER_LOWER=all")
@pytest.mark.parametrize("family", lower.FAMILIES)
def test_lowering_a_family_again_gives_the_pinned_file(family: str) -> None:
    assert lower.lower_family(family) == (lower.TEXTS / f"{family}.asc").read_text()


def test_a_changed_definition_changes_the_hash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for file in lower.TILES.glob("*.py"):
        (tmp_path / file.name).write_text(file.read_text())
    monkeypatch.setattr(lower, "TILES", tmp_path)
    before = {family: lower.definition_hash(family) for family in lower.FAMILIES}
    (tmp_path / "codes.py").write_text((tmp_path / "codes.py").read_text() + "\n")
    changed = {family for family in lower.FAMILIES if lower.definition_hash(family) != before[family]}
    assert changed == {"codes", "swiglu"}, "swiglu uses functions of codes"


def test_an_unknown_kernel_is_named() -> None:
    pytest.importorskip("tilelang")
    with pytest.raises(KeyError, match=r"no kernel 'nothing' in tiles/lists\.py"):
        lower.lower_kernel("lists", "nothing")


def test_another_tilelang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "RELEASE", "0.0.1")
    with pytest.raises(RuntimeError, match=r"made with tilelang 0\.0\.1"):
        lower.lower_kernel("lists", "fill_ids")


@pytest.mark.parametrize("family", lower.FAMILIES)
def test_the_head_lists_every_kernel_with_what_it_writes(family: str) -> None:
    kernels = generated.family(family)
    text = (lower.TEXTS / f"{family}.asc").read_text()
    assert {f"{name}_kernel" for name in kernels} == set(re.findall(r'extern "C" .* void (\w+)\(', text))
    assert all(any(parameter.written for parameter in made.kernel.parameters) for made in kernels.values())


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(KeyError, match="value"):
        generated.family("lists")["fill_ids"](1, out=torch.zeros(4, dtype=torch.int32), count=4)


@tilelang
def test_the_same_text_under_tilelangs_own_names_gives_the_same_codes(tmp_path: Path) -> None:
    spec = find_spec("tilelang")
    assert spec is not None and spec.submodule_search_locations is not None
    own = Path(spec.submodule_search_locations[0]) / "src" / "tl_templates" / "ascend" / "simd_inst.h"
    body = lower.pinned_kernels("swiglu")["swiglu_bf16_mxfp8"]
    head = '#include "c_api/asc_simd.h"\n#include "simt_api/asc_simt.h"\n'
    head += "using fp8_e4_t = float8_e4m3_t;\nstruct fp8_e5_t {};\n"
    file = tmp_path / "wheel.asc"
    file.write_text(f'{head}#include "{own}"\n{body}\n')
    pinned = generated.family("swiglu")["swiglu_bf16_mxfp8"].kernel
    signature = ", ".join(
        f"{p.name}{'!' if p.written else ''}"
        if p.letter == "p"
        else f"{p.name}: {dict(i='i32', l='i64', f='f32')[p.letter]}"
        for p in pinned.parameters
    )
    wheel = Program(file, zero_is_ub=True).kernel(pinned.entry, signature)
    generator = torch.Generator().manual_seed(5)
    gate, up = (torch.randn(3, 70, generator=generator).bfloat16() * 6 for _ in range(2))
    results = []
    for kernel in (pinned, wheel):
        codes, scale = torch.zeros(3, 70, dtype=torch.uint8), torch.zeros(3, 3, dtype=torch.uint8)
        values = {"gate": gate, "up": up, "weights": None, "out": codes, "scale": scale, "cores": 2, "rows": 3}
        values |= {"gate_pitch": 70, "up_pitch": 70, "out_pitch": 70, "scale_pitch": 3, "width": 70}
        values |= {"limit": 10.0, "weighted": 0}
        kernel(2, *(values[parameter.name] for parameter in kernel.parameters))
        results.append((codes, scale))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[0][1].unique().numel() > 1, "groups of different magnitude"


def test_generated_text_includes_nothing_but_its_names() -> None:
    for family in lower.FAMILIES:
        included = re.findall(r"^#include (.*)$", (lower.TEXTS / f"{family}.asc").read_text(), re.MULTILINE)
        assert included == ['"tile_names.h"'], family
    assert (twin_build.KERNELS / "generated" / "tile_names.h").exists()
