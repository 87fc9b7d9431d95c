"""A small random DeepSeek-V4.1 checkpoint with everything a real one has: for tests, demos and tools.

All layer kinds, Engram, draft blocks, image tower, tokenizer and the released storage formats, in about 4 MB. The same
seed gives the same bytes: values come from counted bits of a named generator per tensor, not from a library's sampler.
What the model says is noise; its logits have a spread of 1 to 2, so that sampling and expert choice are lively.

Source: DeepSeek-V4.1-Flash (model specification, sections 2, 8.1, 10 and 15).
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from deepinfer.models.checkpoint import INDEX_FILE, SINGLE_FILE, TensorSpec
from deepinfer.models.config_file import CONFIG_FILE
from deepinfer.models.deepseek_v41_flash.config import ModelConfig
from deepinfer.models.deepseek_v41_flash.engram_tables import compress_vocabulary, engram_primes
from deepinfer.models.deepseek_v41_flash.tensors import expected_tensors
from deepinfer.models.deepseek_v41_flash.tiny_tokenizer import TOKENIZER_FILE, TinyVocabulary, build_tokenizer
from deepinfer.ops.quant import pow2_ceil_bits, quantize, ue8m0_value

Progress = Callable[[int, int], None]
"""Called with the number of tensors written so far, and of all that will be."""


def make_tiny(
    path: str | Path,
    seed: int = 0,
    quant: bool = True,
    shards: int = 3,
    progress: Progress | None = None,
    *,
    force: bool = False,
    text_fields: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Write a complete random checkpoint.

    Args:
        path: a folder that does not exist or is empty.
        seed: of all weights; the tokenizer does not depend on it.
        quant: released storage formats; without, bf16 and fp32 and a smaller model.
        shards: weight files; 1 writes a single `model.safetensors` without an index.
        progress: told how many tensors are done.
        force: write into a folder that is not empty; files of an older checkpoint in it are removed first.
        text_fields: fields of `text_config` to change, such as the number of layers and what goes with it.

    Returns:
        The configuration as `ModelConfig.from_dir` reads it back.

    Raises:
        FileExistsError: the folder is not empty; nothing was written.
        ValueError: `shards` is below 1, or `seed` below 0.
        ConfigError: `text_fields` contradict the rest.
    """
    folder = Path(path)
    if shards < 1 or seed < 0:
        raise ValueError(f"shards must be at least 1 and seed at least 0, got {shards} and {seed}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not force:
        raise FileExistsError(f"{folder}: is there already; give a new or empty folder, or force to overwrite it")
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / CONFIG_FILE, folder / INDEX_FILE, *folder.glob("model*.safetensors")):
        old.unlink(missing_ok=True)
    tokenizer = build_tokenizer(384 if quant else 320)
    (folder / TOKENIZER_FILE).write_text(tokenizer.to_str(), encoding="utf-8")
    data = _config(quant, TinyVocabulary(tokenizer), text_fields or {})
    config = ModelConfig.from_dict(data)
    _write_weights(folder, expected_tensors(config), seed, shards, progress)
    # last, so that an interrupted folder is not taken for a checkpoint
    (folder / CONFIG_FILE).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return config


def _config(quant: bool, vocabulary: TinyVocabulary, changes: Mapping[str, Any]) -> dict[str, Any]:
    sizes = _QUANT_SIZES if quant else _PLAIN_SIZES
    text: dict[str, Any] = {"model_type": "deepseek_v41_text", **_TEXT, **sizes, "vocab_size": vocabulary.vocab_size}
    text |= changes
    primes = engram_primes(
        len(text["engram_layer_ids"]), text["engram_vocab_size"], text["engram_max_ngram_size"], text["engram_n_heads"]
    )
    text["engram_num_embeddings"] = [sum(layer) for layer in primes]
    text["engram_compressed_vocab_size"] = int(compress_vocabulary(vocabulary).max()) + 1
    text["dspark_noise_token_id"] = vocabulary.id_of("<｜noise｜>")
    data = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": vocabulary.id_of("<｜deepseek_image｜>"),
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": _VISION if quant else {**_VISION, "num_hidden_layers": 1, "hidden_size": 16},
    }
    if quant:
        data["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        }
    return data


def _write_weights(
    folder: Path, specs: Mapping[str, TensorSpec], seed: int, shards: int, progress: Progress | None
) -> None:
    tensors: dict[str, Tensor] = {}
    for name, spec in specs.items():
        if name in tensors:
            continue  # a scale, made with its weight
        scale = specs.get(_scale_name(name))
        tensors.update(_make(name, spec, scale, seed))
        if progress is not None:
            progress(len(tensors), len(specs))
    if shards == 1:
        (folder / SINGLE_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(_split(tensors, shards), 1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        (folder / file).write_bytes(save({name: tensors[name] for name in names}, metadata={"format": "pt"}))
        weight_map.update(dict.fromkeys(names, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _split(tensors: Mapping[str, Tensor], shards: int) -> Iterator[list[str]]:
    """Names of each shard, of about equal bytes; a scale stays with its weight."""
    total, done, number = sum(tensor.nbytes for tensor in tensors.values()), 0, 1
    names: list[str] = []
    for name, tensor in tensors.items():
        if done * shards >= total * number and number < shards and not name.endswith(".scale"):
            yield names
            names, number = [], number + 1
        names.append(name)
        done += tensor.nbytes
    yield names


def _make(name: str, spec: TensorSpec, scale: TensorSpec | None, seed: int) -> dict[str, Tensor]:
    values = _values(name, spec, scale, seed)
    if scale is None:
        fp32 = spec.dtypes[0] == "F32" or (name.startswith("vision.") and "norm" in name)
        return {name: values if fp32 else values.bfloat16()}
    if spec.dtypes[0] == "I8":
        packed = quantize(values, "mxfp4")
        codes, exponents = packed.data.view(torch.int8), packed.scale
    elif scale.shape[0] == spec.shape[0]:  # a scale per row
        packed = quantize(values, "mxfp8")
        codes, exponents = packed.data.view(torch.float8_e4m3fn), packed.scale
    else:
        codes, exponents = _quantize_blocks(values)
    return {name: codes, _scale_name(name): exponents.view(torch.float8_e8m0fnu)}


def _quantize_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes [N, K] and ue8m0 bytes [ceil(N / 32), ceil(K / 32)]."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % 32, 0, -rows % 32))
    blocks = padded.reshape(padded.shape[0] // 32, 32, padded.shape[1] // 32, 32)
    exponents = pow2_ceil_bits(blocks.abs().amax((1, 3)).clamp(min=1e-4) / 448).to(torch.uint8)
    codes = (blocks / ue8m0_value(exponents)[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.reshape(padded.shape)[:rows, :columns].contiguous(), exponents


def _values(name: str, spec: TensorSpec, scale: TensorSpec | None, seed: int) -> Tensor:
    """float32 values of a tensor, before they are stored."""
    columns = spec.shape[-1] * (2 if spec.dtypes[0] == "I8" else 1)
    shape = (*spec.shape[:-1], columns)
    bits = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
    if "norm" in name or name.endswith(("q_weight", "k_weight")) or name.endswith("_scale"):
        return torch.from_numpy(0.5 + _uniform(bits, int(np.prod(shape)))).float().reshape(shape)
    values = torch.from_numpy(_normal(bits, int(np.prod(shape)))).float().reshape(shape)
    return values * _spread(name, columns)


def _spread(name: str, columns: int) -> float:
    """Standard deviation of a tensor's values; `columns` is the length of the sum that it takes part in."""
    for suffix, spread in _FIXED_SPREADS.items():
        if name.endswith(suffix):
            return spread
    if name.startswith("image_"):
        return 1.0
    gain = next((gain for suffix, gain in _GAINS.items() if name.endswith(suffix)), 1.2)
    return float(gain / columns**0.5)


def _normal(bits: np.random.PCG64, number: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Sums of four 16-bit numbers: mean 0, deviation 1, nearly normal, and equal in every version of the library."""
    words = bits.random_raw(number).astype("<u8").view("<u2").reshape(number, 4)
    centred: np.ndarray[Any, np.dtype[np.int64]] = words.sum(1, dtype=np.int64) - 2 * 65535
    return centred.astype(np.float64) * (3**0.5 / 65536)


def _uniform(bits: np.random.PCG64, number: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    high = bits.random_raw(number) >> np.uint64(11)
    return high.astype(np.float64) * 2.0**-53


def _scale_name(name: str) -> str:
    return f"{name.removesuffix('.weight')}.scale"


_FIXED_SPREADS = {
    "embed.weight": 1.0,
    "attn_sink": 1.0,
    "gate.bias": 0.1,
    "gate.bias_vl": 0.1,
    "_base": 0.7,
    ".bias": 0.1,
}
_GAINS = {
    "_fn": 1.0,
    "attn.wq_b.weight": 1.6,
    "indexer.wq_b.weight": 1.6,
    "compressor.wgate.weight": 1.6,
    "gate.weight": 1.6,
    # what sublayers add stays small beside the streams, or rounding noise would grow from layer to layer
    "attn.wo_b.weight": 0.25,
    "mlp.w2.weight": 1.2,
    "aligner.w2.weight": 1.2,
    ".w2.weight": 0.4,
}

_TEXT: dict[str, Any] = {
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-20,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "o_groups": 2,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}


def _yarn(original: int) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": original,
    }


_QUANT_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 9,
    "num_attention_heads": 8,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "sliding_window": 16,
    "rope_scaling": _yarn(256),
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4, 5],
    "index_source_layer_ids": [2, 4, 5, 7],
    "index_topk": 16,
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 8,
    "swiglu_limit": 1.5,
    "n_routed_experts": 8,
    "engram_layer_ids": [1, 4],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 61,
    "dspark_target_layer_ids": [6, 7, 8],
}

_PLAIN_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 48,
    "o_lora_rank": 16,
    "sliding_window": 8,
    "rope_scaling": _yarn(256),
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 6],
    "index_topk": 8,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "swiglu_limit": 1.0,
    "n_routed_experts": 4,
    "engram_layer_ids": [1],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 41,
    "dspark_target_layer_ids": [4, 5, 6],
}

_VISION: dict[str, Any] = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "patch_size": 4,
    "rope_theta": 10000.0,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 1024,
    "max_wh_ratio": None,
}
