"""Weight files: every damage is found before a weight is read, and named with its file."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer.models.checkpoint import INDEX_FILE, Checkpoint, TensorSpec
from deepinfer.models.deepseek_v41_flash.config import ModelConfig
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny
from deepinfer.models.deepseek_v41_flash.weights import load_weights
from deepinfer.models.errors import CheckpointError

SECOND = "model-00002-of-00003.safetensors"
EXPECTED = {
    "a": TensorSpec((2, 3), ("F32",)),
    "b": TensorSpec((4,), ("BF16", "F32")),
    "extra.c": TensorSpec((1,), ("I8",), "extra"),
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    make_tiny(folder, seed=3)
    return folder


@pytest.fixture
def tiny(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "checkpoint"))


def write(folder: Path, **tensors: torch.Tensor) -> Path:
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def edit_shard(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the shard that holds `name`; the index stays as it was."""
    file = folder / json.loads((folder / INDEX_FILE).read_text())["weight_map"][name]
    tensors = {key: value.clone() for key, value in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def fault(folder: Path) -> str:
    """The message of a load that must fail before any weight is read."""
    config = ModelConfig.from_dir(folder)
    seen: list[tuple[int, int]] = []
    with pytest.raises(CheckpointError) as caught:
        load_weights(Checkpoint.open(folder), config, progress=lambda done, total: seen.append((done, total)))
    assert not seen
    assert "Nothing was loaded." in str(caught.value)
    return str(caught.value)


def raw_file(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def test_a_missing_shard_is_named_with_what_it_should_hold(tiny: Path) -> None:  # LC-1
    (tiny / SECOND).unlink()
    index = json.loads((tiny / INDEX_FILE).read_text())["weight_map"]
    message = fault(tiny)
    assert f"{SECOND}: no such file; {INDEX_FILE} places {list(index.values()).count(SECOND)} tensors in it" in message
    assert "Fetch the named files again" in message


def test_a_truncated_shard_is_named_with_the_missing_bytes(tiny: Path) -> None:
    size = (tiny / SECOND).stat().st_size
    with open(tiny / SECOND, "r+b") as file:
        file.truncate(size - 1000)
    assert f"{SECOND}: cut off: {size - 1000} bytes of {size} that its header describes; 1000 are missing" in fault(
        tiny
    )


@pytest.mark.parametrize("kept", [0, 5, 100])
def test_a_shard_cut_inside_its_header_is_named(tiny: Path, kept: int) -> None:
    with open(tiny / SECOND, "r+b") as file:
        file.truncate(kept)
    assert f"{SECOND}: cut off or damaged: {kept} bytes" in fault(tiny)


def test_all_damaged_shards_are_named_at_once(tiny: Path) -> None:
    (tiny / SECOND).unlink()
    (tiny / "model-00003-of-00003.safetensors").write_bytes(raw_file(b"not json"))
    message = fault(tiny)
    assert "2 faults in the weight files" in message
    assert f"{SECOND}: no such file" in message
    assert "model-00003-of-00003.safetensors: damaged header, not JSON" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (raw_file(b"[1]"), "damaged header: not a JSON object"),
        (raw_file(b"\xff\xfe{}"), "damaged header, not JSON"),
        (raw_file(b"{}", length=2**60), "not even the header of 1152921504606846976 bytes"),
        (raw_file(b'{"a":{"dtype":"F32","shape":[2]}}'), "a has no valid dtype, shape and data_offsets"),
        (raw_file(b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}', bytes(8)), "a has no valid dtype, shape"),
        (raw_file(b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', bytes(8)), "a is F32 [3], 12 bytes, but"),
        (
            raw_file(b'{"a":{"dtype":"Q7","shape":[3],"data_offsets":[0,8]}}', bytes(8)),
            "a has dtype 'Q7', which is none",
        ),
        (
            raw_file(
                b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
                b'"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}',
                bytes(6),
            ),
            "b overlaps a",
        ),
        (
            raw_file(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}', bytes(6)),
            "a leaves a gap after the header",
        ),
        (raw_file(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', bytes(6)), "its header describes only"),
    ],
)
def test_a_damaged_header_is_named_with_its_fault(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    assert "model.safetensors: " in str(caught.value)
    assert message in str(caught.value)


def test_a_tensor_that_stands_in_two_files_is_refused(tiny: Path) -> None:
    index = json.loads((tiny / INDEX_FILE).read_text())["weight_map"]
    stolen = load_file(tiny / index["norm.weight"])["norm.weight"]
    edit_shard(tiny, "embed.weight", lambda tensors: tensors.update({"model.norm.weight": stolen}))
    message = fault(tiny)
    assert "norm.weight stands twice: BF16 [128] in model-00001-of-00003.safetensors and BF16 [128] in" in message
    assert "remove the stale file" in message


def test_a_folder_without_weights_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"neither model.safetensors.index.json nor model.safetensors is there"):
        Checkpoint.open(tmp_path)
    (tmp_path / "part.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"it holds part.safetensors but no index"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not an index of shards"),
        ('{"metadata": {}}', "it has no weight_map"),
        ('{"weight_map": {}}', "weight_map is not a JSON object with entries"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "shards must be files of this folder"),
        ('{"weight_map": {"a": 3}}', "shards must be files of this folder"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / INDEX_FILE).write_text(index)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


def test_a_shard_whose_name_no_file_can_have_is_missing(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "x" * 5000, "b": "n\0l", "c": "c.safetensors"}}))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    assert [": no such file; " in problem for problem in caught.value.problems] == [True] * 3
    assert "(5000 characters)" in str(caught.value) and len(str(caught.value)) < 1000


def test_missing_unexpected_and_misshaped_tensors_are_listed_at_once(tiny: Path) -> None:  # LC-2
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.attn.wq_a.weight_scale_inv"] = tensors.pop("layers.0.attn.wq_a.scale")  # renamed
        tensors["layers.0.attn.kv_norm.scale"] = torch.ones(2)  # unused
        del tensors["layers.0.attn.wkv.scale"]  # dropped
        tensors["layers.0.attn_norm.weight"] = tensors["layers.0.attn_norm.weight"][:64].clone()
        tensors["layers.0.hc_attn_base"] = tensors["layers.0.hc_attn_base"].half()

    edit_shard(tiny, "layers.0.attn.wkv.scale", change)
    message = fault(tiny)
    file = "model-00001-of-00003.safetensors"
    for line in (
        "tensors differ from what config.json asks for: 2 missing, 2 unexpected, 1 of the wrong shape, 1 of the wrong",
        f"layers.0.attn.wq_a.scale: expected F8_E8M0 or U8 [2, 4] in {file}, where the index places it",
        f"layers.0.attn.wkv.scale: expected F8_E8M0 or U8 [2, 4] in {file}, where the index places it",
        f"layers.0.attn.wq_a.weight_scale_inv: found F8_E8M0 [2, 4] in {file}",
        f"layers.0.attn.kv_norm.scale: found F32 [2] in {file}",
        f"layers.0.attn_norm.weight: expected BF16 or F32 [128], found BF16 [64] in {file}",
        f"layers.0.hc_attn_base: expected F32 [24], found F16 [24] in {file}",
        "Use the config.json that belongs to these weights",
    ):
        assert line in message


def test_long_lists_are_shortened_with_their_count_in_front(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, a=torch.zeros(2, 3)))
    expected = {f"t{i}": TensorSpec((1,), ("F32",)) for i in range(250)}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.validate(expected, {"backbone"})
    message = str(caught.value)
    assert "250 tensors missing:" in message
    assert "... and 150 more" in message
    assert "t99:" in message
    assert "t100:" not in message


def test_parts_that_are_skipped_may_be_there_or_not(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, a=torch.zeros(2, 3), b=torch.zeros(4)))
    checkpoint.validate(EXPECTED, {"backbone"})
    with pytest.raises(CheckpointError, match=r"1 missing(.|\n)*extra.c: expected I8 \[1\]"):
        checkpoint.validate(EXPECTED, {"backbone", "extra"})
    more = Checkpoint.open(write(tmp_path, a=torch.zeros(2, 3), b=torch.zeros(4), other__d=torch.zeros(1)))
    more.validate(EXPECTED, {"backbone"}, skipped=lambda name: name.startswith("other."))
    with pytest.raises(CheckpointError, match=r"1 tensor unexpected:(.|\n)*other.d: found F32 \[1\]"):
        more.validate(EXPECTED, {"backbone"})


def test_a_model_prefix_is_tolerated(tiny: Path) -> None:
    for file in tiny.glob("model-*.safetensors"):
        save_file({f"model.{name}": value.clone() for name, value in load_file(file).items()}, file)
    index = json.loads((tiny / INDEX_FILE).read_text())
    index["weight_map"] = {f"model.{name}": file for name, file in index["weight_map"].items()}
    (tiny / INDEX_FILE).write_text(json.dumps(index))
    load_weights(Checkpoint.open(tiny), ModelConfig.from_dir(tiny))


DTYPES: list[Any] = [
    torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8, torch.uint8,
    torch.int32, torch.int64, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_shares_the_file_and_has_its_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.randint(0, 2, (3, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    stored = value.view(torch.float8_e8m0fnu) if dtype == torch.float8_e8m0fnu else value.to(dtype)
    checkpoint = Checkpoint.open(write(tmp_path, t=stored))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = checkpoint.get("t")
    assert got.dtype == dtype
    assert torch.equal(got.view(torch.uint8), stored.view(torch.uint8))
    assert got.data_ptr() == checkpoint.get("t").data_ptr()


def test_writing_to_a_tensor_never_reaches_the_file(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, a=torch.zeros(2, 3)))
    before = (tmp_path / "model.safetensors").read_bytes()
    tensor = checkpoint.get("a")
    tensor.fill_(7)
    checkpoint.release()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert tensor.eq(7).all()
    assert checkpoint.get("a").eq(0).all()


def test_unaligned_and_empty_tensors_can_be_read(tmp_path: Path) -> None:
    header = (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]},'
    )
    header += b'"c":{"dtype":"F32","shape":[0,4],"data_offsets":[9,9]}}'
    data = b"\x05" + torch.tensor([1.0, 2.0]).numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(raw_file(header, data))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.get("b").tolist() == [1.0, 2.0]
    assert checkpoint.get("c").shape == (0, 4)
    assert checkpoint.num_bytes == 9
    with pytest.raises(CheckpointError, match="has no tensor d"):
        checkpoint.get("d")
