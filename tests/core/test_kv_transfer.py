"""Prefixes that one engine computed and another continues: the bits are those of a request alone, or it is refused."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from deepinfer import LLM, SamplingParams
from deepinfer.core import kv_transfer
from deepinfer.core.errors import KVTransferError, OutOfBlocksError
from deepinfer.core.kv_bundle import KVBundle
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny
from deepinfer.testing import HashModel, NullModel
from deepinfer.testing.facts import RequestFacts

BLOCK, PAGE = 16, 4
SETTINGS = {"backend": "cpu", "block_size": BLOCK, "window_page": PAGE, "max_model_len": 256, "max_num_seqs": 4}

pytestmark = pytest.mark.usefixtures("one_thread")


def text(seed, length):
    rng = random.Random(f"transfer {seed}")
    return [rng.randrange(3, 64) for _ in range(length)]


def sampling(max_tokens=8, **settings):
    return SamplingParams(**{"max_tokens": max_tokens, "seed": 7, "logprobs": 2, "ignore_eos": True} | settings)


def open_llm(model=None, **settings):
    return LLM(model or HashModel(64), **{"num_kv_blocks": 32} | SETTINGS | settings)


def alone(prompt, params, model=None, **settings):
    with open_llm(model, prefix_caching=False, **settings) as llm:
        return RequestFacts.of(llm.generate([prompt], params)[0])


def exported(prompt, model=None, max_tokens=1, **settings):
    """What an engine exports after it answered a prompt."""
    with open_llm(model, **settings) as llm:
        output = llm.generate([prompt], sampling(max_tokens))[0]
        return llm.engine.export_blocks(prompt + output.outputs[0].token_ids)


def check_sound(llm):
    pool = llm.engine.blocks.pool
    pool.check()
    assert (pool.num_free_blocks, pool.num_free_pages) == (pool.num_blocks, pool.num_window_pages)
    assert pool.num_free_slots == pool.num_slots


def held(llm):
    stats = llm.engine.blocks.pool.prefix_stats()
    return stats["held_blocks"], stats["held_pages"]


@pytest.mark.parametrize(("length", "cached"), [(40, 32), (48, 48), (20, 16), (130, 128)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_continues_what_another_engine_computed(length, cached, asynchronous) -> None:
    prompt = text(0, length)
    bundle = exported(prompt)
    assert bundle.num_tokens == cached and bundle.token_ids.tolist() == prompt[:cached]
    with open_llm(async_scheduling=asynchronous) as llm:
        assert llm.engine.import_blocks(bundle) == cached
        check_sound(llm)
        longer = prompt + text(1, 5)
        output = llm.generate([longer], sampling())[0]
        assert output.num_cached_tokens == cached
        assert RequestFacts.of(output) == alone(longer, sampling())
        check_sound(llm)


def test_the_same_prompt_hits_even_where_it_ends_with_a_block() -> None:
    """Its last token must run, so it starts a block earlier, and the pages for that came along."""
    prompt = text(0, 3 * BLOCK)
    with open_llm() as llm:
        llm.engine.import_blocks(exported(prompt))
        output = llm.generate([prompt], sampling())[0]
        assert output.num_cached_tokens == 2 * BLOCK
        assert RequestFacts.of(output) == alone(prompt, sampling())


def test_a_running_request_is_exported_by_its_id_and_goes_on() -> None:
    prompt = text(0, 20)
    with open_llm() as source, open_llm() as target:
        engine = source.engine
        engine.add_request("r", prompt, sampling(40), cache_salt="s")
        while len(engine._requests["r"][0].completion.token_ids) < 30:
            engine.step()
        bundle = engine.export_blocks("r")
        assert bundle.num_tokens == 48
        live = engine._requests["r"][0].output
        while not live.finished:
            engine.step()
        assert RequestFacts.of(live) == alone(prompt, sampling(40, seed=7))
        target.engine.import_blocks(bundle)
        longer = prompt + live.outputs[0].token_ids
        for salt, cached in (("s", 48), ("other", 0), (None, 0)):
            target.engine.add_request("x", longer, sampling(), cache_salt=salt)
            output = target.engine._requests["x"][0].output
            while not output.finished:
                target.engine.step()
            assert output.num_cached_tokens == cached
            assert RequestFacts.of(output) == alone(longer, sampling())


@pytest.mark.parametrize("backend", ["cpu", "fake"])
@pytest.mark.parametrize("kv_rounding", [True, False])
def test_v41_continues_bit_for_bit_through_a_file(backend, kv_rounding, tmp_path) -> None:
    make_tiny(tmp_path / "model", quant=False)
    settings = {"backend": backend, "max_model_len": 96, "max_num_batched_tokens": 64, "kv_rounding": kv_rounding}
    settings |= {"dtype": "bfloat16" if kv_rounding else "float32"}
    model, prompt = str(tmp_path / "model"), text(3, 37)
    exported(prompt, model, max_tokens=4, **settings).save(tmp_path / "prefix.safetensors")
    bundle = KVBundle.load(tmp_path / "prefix.safetensors")
    assert bundle.num_tokens == 32 and len(bundle.layout.block_records) > 2
    longer = prompt + text(4, 6)
    with open_llm(model, **settings) as llm:
        llm.engine.import_blocks(bundle)
        output = llm.generate([longer], sampling(6))[0]
        assert output.num_cached_tokens == 32
        check_sound(llm)
    assert RequestFacts.of(output) == alone(longer, sampling(6), model, **settings)


def test_other_weights_are_refused(tmp_path) -> None:
    prompt = text(0, 40)
    for seed in (1, 2):
        make_tiny(tmp_path / str(seed), quant=False, seed=seed)
    bundle = exported(prompt, str(tmp_path / "1"), max_model_len=96)
    with open_llm(str(tmp_path / "2"), max_model_len=96) as llm:
        with pytest.raises(KVTransferError, match="of another engine: model is DeepseekV41ForCausalLM"):
            llm.engine.import_blocks(bundle)
        assert held(llm) == (0, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 8}, r"block_size is 16, not 8; block_bytes is \d+, not \d+"),
        ({"window_page": 8}, "window_page is 4, not 8"),
        ({"dtype": "float32"}, "numerics is bfloat16, .*, not float32, "),
        ({"kv_rounding": False, "dtype": "float32"}, "numerics is .*records rounded, not float32, nothing rounded"),
        ({"prefix_caching": False}, "stores no prefixes; set prefix_caching"),
        ({"model": HashModel(65)}, "model is hash 64, not hash 65"),
        ({"model": HashModel(64, window=9)}, "window is 8, not 9"),
        ({"model": NullModel(64)}, r"block_records is \['pairs .*'tokens .*\], not \[\]"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(settings, message) -> None:
    bundle = exported(text(0, 40), dtype="bfloat16")
    with open_llm(settings.pop("model", None), **{"dtype": "bfloat16"} | settings) as llm:
        with pytest.raises(KVTransferError, match=message):
            llm.engine.import_blocks(bundle)
        assert held(llm) == (0, 0)


def test_changed_token_ids_are_found() -> None:
    bundle = exported(text(0, 40))
    ids = bundle.token_ids.copy()
    ids[BLOCK] += 1
    with open_llm() as llm, pytest.raises(KVTransferError, match="the hash of block 1 does not belong"):
        llm.engine.import_blocks(replace(bundle, token_ids=ids))


def test_what_is_stored_already_stays_and_the_rest_is_added() -> None:
    prompt = text(0, 4 * BLOCK)
    bundle = exported(prompt + text(1, 3))
    with open_llm() as llm:
        llm.generate([prompt[: BLOCK + 5]], sampling(1))
        before = llm.engine.blocks.pool.stored_prefix(np.array(prompt, np.int32))[0].tolist()
        assert llm.engine.import_blocks(bundle) == 4 * BLOCK
        after = llm.engine.blocks.pool.stored_prefix(np.array(prompt, np.int32))[0].tolist()
        assert len(before) == 1 and after[:1] == before and len(after) == 4
        counts = held(llm)
        assert llm.engine.import_blocks(bundle) == 4 * BLOCK
        assert held(llm) == counts
        output = llm.generate([prompt + text(1, 3)], sampling())[0]
        assert output.num_cached_tokens == 4 * BLOCK
        assert RequestFacts.of(output) == alone(prompt + text(1, 3), sampling())
        check_sound(llm)


def test_a_short_pool_gives_up_what_was_used_least_recently() -> None:
    bundle = exported(text("in", 3 * BLOCK + 2))
    with open_llm(num_kv_blocks=8, max_model_len=128) as llm:
        old, new = text("old", 3 * BLOCK + 1), text("new", 4 * BLOCK + 1)
        for prompt in (old, new):
            llm.generate([prompt], sampling(1))
        llm.engine.import_blocks(bundle)
        check_sound(llm)
        found = [llm.engine.blocks.match(np.array([*p, 1], np.int32)).num_tokens for p in (old, new)]
        assert found[1] == 4 * BLOCK and found[0] < 3 * BLOCK
        assert llm.engine.blocks.match(np.array([*bundle.token_ids, 1], np.int32)).num_tokens == 3 * BLOCK


def test_what_requests_hold_is_never_given_up() -> None:
    bundle = exported(text("in", 3 * BLOCK + 2))
    prompt = text("live", 6 * BLOCK)
    with open_llm(num_kv_blocks=8, max_model_len=128) as llm:
        engine = llm.engine
        engine.add_request("r", prompt, sampling(20))
        output = engine._requests["r"][0].output
        while not output.outputs[0].token_ids:
            engine.step()
        free = engine.blocks.num_free_blocks
        assert free < 3
        with pytest.raises(OutOfBlocksError, match=f"need 3 blocks and .* window pages, {free} and .* free"):
            engine.import_blocks(bundle)
        engine.blocks.pool.check()
        while not output.finished:
            engine.step()
        assert RequestFacts.of(output) == alone(prompt, sampling(20))
        assert engine.import_blocks(bundle) == 3 * BLOCK
        check_sound(llm)


def test_an_import_that_fails_half_way_leaves_nothing_to_be_found(monkeypatch) -> None:
    prompt = text(0, 3 * BLOCK + 1)
    bundle = exported(prompt)
    with open_llm() as llm:
        transfer = llm.engine._transfer
        write = transfer._write

        def fail_at_pages(pool, ids, rows):
            if pool is transfer._caches.pages:
                raise MemoryError("no room to stage")
            write(pool, ids, rows)

        monkeypatch.setattr(transfer, "_write", fail_at_pages)
        with pytest.raises(MemoryError):
            llm.engine.import_blocks(bundle)
        assert held(llm) == (0, 0)
        check_sound(llm)
        output = llm.generate([prompt], sampling())[0]
        assert output.num_cached_tokens == 0 and RequestFacts.of(output) == alone(prompt, sampling())


@pytest.mark.parametrize("seed", range(6))
def test_engines_that_exchange_prefixes_all_the_time_answer_as_if_alone(seed, monkeypatch) -> None:
    """Few blocks, so that imports push out what others imported, and parts of a few rows."""
    monkeypatch.setattr(kv_transfer, "_STAGING_BYTES", 700)
    rng = random.Random(seed)
    stems = [text(("stem", seed, i), 70) for i in range(3)]
    engines = [open_llm(num_kv_blocks=blocks, max_model_len=96) for blocks in (7, 12, 20)]
    hits = 0
    for turn in range(12):
        prompt = rng.choice(stems)[: rng.randint(1, 70)] + text((seed, turn), rng.randint(1, 6))
        llm, other = rng.sample(engines, 2)
        output = llm.generate([prompt], sampling(rng.randint(1, 20)))[0]
        hits += output.num_cached_tokens
        assert RequestFacts.of(output) == alone(prompt, sampling(len(output.outputs[0].token_ids)), max_model_len=96)
        if len(prompt) > BLOCK:
            bundle = llm.engine.export_blocks(prompt)
            assert other.engine.import_blocks(bundle) == bundle.num_tokens
        for each in engines:
            check_sound(each)
    assert hits >= 3 * BLOCK
    for each in engines:
        each.close()


def test_there_must_be_something_to_export() -> None:
    with open_llm() as llm:
        with pytest.raises(KVTransferError, match="of these 40 tokens no block of 16 is stored"):
            llm.engine.export_blocks(text(0, 40))
        with pytest.raises(KVTransferError, match="no request 'x' is live"):
            llm.engine.export_blocks("x")
        llm.engine.add_request("x", text(0, 40), sampling())
        with pytest.raises(KVTransferError, match="nothing to export"):
            llm.engine.export_blocks("x")


def test_a_file_holds_all_of_it_and_nothing_unfinished_stays(tmp_path) -> None:
    bundle = exported(text(0, 40))
    bundle.save(tmp_path / "a.safetensors")
    again = KVBundle.load(tmp_path / "a.safetensors")
    assert (again.layout, again.salt) == (bundle.layout, bundle.salt)
    assert again.blocks.equal(bundle.blocks) and again.pages.equal(bundle.pages)
    for name in ("token_ids", "keys", "page_places"):
        assert np.array_equal(getattr(again, name), getattr(bundle, name))
        assert getattr(again, name).dtype == getattr(bundle, name).dtype
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    assert bundle.num_bytes == 2 * bundle.layout.block_bytes + len(bundle.page_places) * bundle.layout.page_bytes


@pytest.mark.parametrize(
    ("header", "tensors", "message"),
    [
        ({"format": "other"}, {}, "no KV bundle: its format is 'other'"),
        ({"version": "2"}, {}, "of version 2; this release reads 1"),
        ({"layout": "{}"}, {}, "its header is damaged: KeyError"),
        ({"layout": "no json"}, {}, "its header is damaged: JSONDecodeError"),
        ({"layout": "[" * 100_000}, {}, "its header is damaged: RecursionError"),
        ({"layout": "[]"}, {}, "its header is damaged: TypeError"),
        ({"salt": "x"}, {}, "its header is damaged: ValueError"),
        ({"salt": "-1"}, {}, "salt is -1; it has 64 bits"),
        ({"salt": str(1 << 64)}, {}, "it has 64 bits"),
        ({"checksum": "0"}, {}, "its records are damaged: they do not have the checksum 0"),
        ({}, {"blocks": torch.zeros(2, 3, dtype=torch.uint8)}, r"blocks has shape \[2, 3\]"),
        ({}, {"keys": torch.zeros(1, dtype=torch.int64)}, r"keys has shape \[1\]; expected \[2\]"),
        ({}, {"keys": torch.zeros(2, dtype=torch.float64)}, "keys is torch.float64; expected torch.int64"),
        ({}, {"page_places": torch.zeros(5, dtype=torch.int32)}, r"pages has shape|must ascend"),
        ({}, {"page_places": torch.tensor([0, 1, 2, 99], dtype=torch.int32)}, r"pages has shape|must ascend"),
    ],
)
def test_damaged_files_are_refused(header, tensors, message, tmp_path) -> None:
    path = tmp_path / "a.safetensors"
    bundle = exported(text(0, 40))
    bundle.save(path)
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    save_file(load_file(path) | tensors, path, about | header)
    with pytest.raises(KVTransferError, match=message):
        KVBundle.load(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_size": "16"}, "layout.block_size is '16'; expected an integer, at least 1"),
        ({"block_size": 16.0}, "layout.block_size is 16.0"),
        ({"window_page": 0}, "layout.window_page is 0"),
        ({"page_bytes": -1}, "layout.page_bytes is -1; expected an integer, at least 0"),
        ({"block_records": [{}]}, "layout.block_records"),
        ({"colour": 1}, "colour"),
    ],
)
def test_damaged_layouts_are_refused(changed, message, tmp_path) -> None:
    path = tmp_path / "a.safetensors"
    exported(text(0, 40)).save(path)
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    about["layout"] = json.dumps(json.loads(about["layout"]) | changed)
    save_file(load_file(path), path, about)
    with pytest.raises(KVTransferError, match=f"its header is damaged: .*{message}"):
        KVBundle.load(path)


def test_no_changed_bit_of_a_file_gets_in(tmp_path) -> None:
    path = tmp_path / "a.safetensors"
    bundle = exported(text(0, 40))
    bundle.save(path)
    whole, rng = path.read_bytes(), random.Random(0)
    for _ in range(200):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            loaded = KVBundle.load(path)
        except KVTransferError:
            continue
        # The hit was the header's layout or salt, which an engine compares with its own.
        assert (loaded.layout, loaded.salt) != (bundle.layout, bundle.salt)
        with open_llm() as llm, pytest.raises(KVTransferError):
            llm.engine.import_blocks(loaded)


def test_a_bundle_that_cannot_be_written_says_so(tmp_path) -> None:
    with pytest.raises(OSError, match="cannot be written"):
        exported(text(0, 40)).save(tmp_path / "absent" / "a.safetensors")


@pytest.mark.parametrize(
    "source", [5, None, b"abcd", [[1, 2], [3, 4]], [[1], [2, 3]], [1 << 31], [1 << 70], ["a"], [1.5]]
)
def test_what_is_no_list_of_token_ids_is_not_exported(source) -> None:
    with open_llm() as llm, pytest.raises(KVTransferError, match="a live request's id or a list of token ids"):
        llm.engine.export_blocks(source)


def test_a_file_that_is_cut_off_is_refused(tmp_path) -> None:
    path = tmp_path / "a.safetensors"
    exported(text(0, 40)).save(path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(KVTransferError, match="no KV bundle, or damaged"):
        KVBundle.load(path)
    with pytest.raises(OSError):
        KVBundle.load(tmp_path / "absent")
