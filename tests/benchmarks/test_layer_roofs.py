"""What whole layers cost at least: counted by hand for the released dimensions."""

import layer_roofs
import pytest
import random_model
from layer_roofs import Demand

from deepinfer.models.deepseek_v41_flash.config import ModelConfig


@pytest.fixture(scope="module")
def released():
    return random_model.read_config(random_model.RELEASED)


def roofs(released, count, *, draft=False):
    return layer_roofs.LayerRoofs(random_model.cut_config(released, count), draft=draft)


EXPERT = 3 * 5120 * 2304
"""Values of one."""


def test_one_row_reads_its_experts_and_all_else_once(released):
    added = roofs(released, 6).decode(1, 4096).num_bytes - roofs(released, 5).decode(1, 4096).num_bytes
    # layer 24: attention and shared expert in fp8, six experts in fp4, router and index weights in bf16, mixing in fp32
    dense = 1280 * 5120 + 32768 * 1280 + 512 * 5120 + 8192 * 4096 + 5120 * 8192 + EXPERT + 4096 * 1280
    least = dense * (1 + 1 / 32) + 6 * EXPERT * (1 / 2 + 1 / 32) + 2 * (384 + 32) * 5120 + 8 * 24 * 4 * 5120
    records = 128 * 528 + 512 * 288 + 4096 * 68
    assert added == pytest.approx(least + records, rel=1e-3)


def test_many_rows_read_every_expert_once(released):
    work = roofs(released, 5)
    few, many = work.decode(1, 4096), work.decode(4096, 4096)
    caches = 4095 * (few.num_bytes - work.decode(1, 0).num_bytes)
    assert many.num_bytes - few.num_bytes - caches == pytest.approx(5 * 378 * EXPERT * (1 / 2 + 1 / 32), rel=1e-3)
    assert many.flops == pytest.approx(4096 * few.flops)


def test_longer_contexts_cost_index_keys_alone_once_all_places_are_taken(released):
    work = roofs(released, 5)  # layer 2 scores pairs and layer 20 single tokens
    longer, shorter = work.decode(3, 65536), work.decode(3, 32768)
    assert longer.num_bytes - shorter.num_bytes == 3 * (32768 // 2 + 32768) * 68
    assert longer.flops - shorter.flops == 2 * 3 * (32768 // 2 + 32768) * 32 * 128
    behind_the_pool = roofs(released, 6)  # and layer 24 no more than the pool
    assert behind_the_pool.decode(1, 65536).flops - behind_the_pool.decode(1, 32768).flops == pytest.approx(
        (longer.flops - shorter.flops) / 3
    )


def test_a_prompt_costs_its_rows_and_its_weights_once_a_step(released):
    work = roofs(released, 5)
    one, two = work.prefill(1, 8192, 8192), work.prefill(2, 8192, 8192)
    assert two.flops == pytest.approx(2 * one.flops)
    tables = work.prefill(1, 1, 8192)
    dense = 2 * (6 * EXPERT + EXPERT + 128e6) * 5 * 8192
    assert dense < one.flops < 1.3 * dense
    assert one.num_bytes > 4 * tables.num_bytes
    assert one.bound(4200, 770) == "arithmetic" and tables.bound(4200, 770) == "memory"


def test_drafts_cost_rows_of_the_model_and_a_pass_of_their_own(released):
    work = roofs(released, 5, draft=True)
    plain, drafts = work.decode(64, 4096), work.decode(64, 4096, 5)
    assert plain.num_bytes < drafts.num_bytes
    # the head once more, and the chain's table once for each place
    assert drafts.num_bytes - work.decode(384, 4096).num_bytes > (5120 + 5 * 256) * 2 * 129280 - 320 * 3e6
    assert drafts.flops > 6 * plain.flops


def test_rates_that_nobody_knows_give_no_time():
    assert Demand(1e9, 1e12).us(0.0, 0.0) == 0.0
    assert Demand(1e9, 1e12).us(1000.0, 0.0) == pytest.approx(1000.0)
    assert Demand(1e9, 1e12).us(1000.0, 100.0) == pytest.approx(10000.0)


def test_the_whole_model_weighs_what_its_memory_plan_says(released):
    from deepinfer.models.deepseek_v41_flash.memory_plan import MemoryPlan

    config = random_model.cut_config(released, 40)
    assert isinstance(config, ModelConfig)
    plan = MemoryPlan.of(config, vision=False)
    many = roofs(released, 40, draft=True).decode(10**6, 0, 5)
    embeddings = 129280 * (5120 + 256) * 2
    twice = 129280 * (5120 + 4 * 256) * 2  # the head is read by both passes, the chain's table at every place
    assert many.num_bytes - twice == pytest.approx(plan.total_weight_bytes - embeddings, rel=1e-4)
