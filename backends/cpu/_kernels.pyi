"""Row kernels of the CPU backend. Sources: `backends/cpu/native/`.

A tensor is passed as its address (`tensors.address`), 0 for an absent one; the caller has checked the layout and keeps
it alive. Kinds are the numbers of `tensors.KIND` and `tensors.QUANT_KIND`. Shapes stand in the op contracts. Kernels
release the GIL. An index outside its table is an IndexError; what was written is undefined then.
"""

import numpy as np
from numpy.typing import NDArray

_Cache = tuple[int, int, int, int, int, int, bool]
_Ints = NDArray[np.int32]
_Floats = NDArray[np.float32]
_Seeds = NDArray[np.int64]

def sparse_attn(
    out: int,
    lse: int,
    q: int,
    kind: int,
    rows: int,
    heads: int,
    dim: int,
    window: _Cache,
    window_slots: int,
    window_columns: int,
    compressed: _Cache,
    slots: int,
    columns: int,
    scale: float,
    sink: int,
    num_threads: int,
) -> None: ...
def attn_merge(
    out: int, kind: int, out_lse: int, o: int, lse: int, splits: int, rows: int, dim: int, num_threads: int
) -> None: ...
def vision_attn(
    out: int,
    q: int,
    k: int,
    v: int,
    kind: int,
    rows: int,
    heads: int,
    dim: int,
    cu_seqlens: int,
    images: int,
    scale: float,
    num_threads: int,
) -> None: ...
def store_rows(
    normed: int,
    x: int,
    kind: int,
    rows: int,
    dim: int,
    weight: int,
    weight_kind: int,
    eps: float,
    positions: int,
    table: int,
    table_rows: int,
    table_width: int,
    cache_args: _Cache,
    slots: int,
    ratio: int,
    num_threads: int,
) -> None: ...
def gather(out: int, kind: int, cache_args: _Cache, slots: int, count: int, num_threads: int) -> None: ...
def copy_rows(
    pool: int, num_rows: int, stride_bytes: int, row_bytes: int, sources: int, destinations: int, count: int
) -> None: ...
def kv_compress(
    out: int,
    kind: int,
    gate: int,
    value: int,
    rows: int,
    n: int,
    state: int,
    num_slots: int,
    slot_stride: int,
    ring: int,
    state_slots: int,
    positions: int,
    row_to_seq: int,
    cu_seqlens: int,
    sequences: int,
    ratio: int,
    num_threads: int,
) -> None: ...
def engram_ngrams(
    out: int,
    rows: int,
    depth: int,
    input_ids: int,
    row_to_seq: int,
    cu_seqlens: int,
    sequences: int,
    history: int,
    token_map: int,
    vocabulary: int,
    pad_token: int,
    blocked: int,
    history_blocked: int,
) -> None: ...
def engram_hash(
    out: int,
    layers: int,
    rows: int,
    depth: int,
    heads: int,
    ngrams: int,
    multipliers: int,
    primes: int,
    offsets: int,
    num_threads: int,
) -> None: ...
def gather_table(
    out: int,
    out_kind: int,
    data: int,
    scales: int,
    kind: int,
    table_rows: int,
    width: int,
    rows: int,
    count: int,
    num_threads: int,
) -> None: ...
def engram_gate(
    out: int,
    h: int,
    kind: int,
    rows: int,
    streams: int,
    hidden: int,
    kv: int,
    kv_kind: int,
    q_weight: int,
    q_kind: int,
    k_weight: int,
    k_kind: int,
    eps: float,
    blocked: int,
    num_threads: int,
) -> None: ...
def linear(
    out: int,
    out_kind: int,
    rows: int,
    n: int,
    k: int,
    x: int,
    x_scales: int,
    x_kind: int,
    w: int,
    w_scales: int,
    w_kind: int,
    acc: int,
    acc_kind: int,
    scale: float,
    num_threads: int,
) -> None: ...
def linear_groups(
    out: int,
    out_kind: int,
    rows: int,
    groups: int,
    n: int,
    k: int,
    x: int,
    x_kind: int,
    w: int,
    w_scales: int,
    w_kind: int,
    num_threads: int,
) -> None: ...
def linear_experts(
    out: int,
    out_kind: int,
    rows: int,
    experts: int,
    n: int,
    k: int,
    x: int,
    x_scales: int,
    x_kind: int,
    w: int,
    w_scales: int,
    w_kind: int,
    psum: int,
    num_threads: int,
) -> None: ...
def stream_mean(out: int, h: int, kind: int, rows: int, streams: int, hidden: int, num_threads: int) -> None: ...
def markov(
    out: int,
    base: int,
    rows: int,
    vocabulary: int,
    tokens: int,
    embed: int,
    embed_kind: int,
    embed_rows: int,
    head: int,
    head_kind: int,
    rank: int,
    num_threads: int,
) -> None: ...
def confidence(
    out: int,
    hidden: int,
    kind: int,
    rows: int,
    width: int,
    tokens: int,
    embed: int,
    embed_kind: int,
    embed_rows: int,
    rank: int,
    proj: int,
    proj_kind: int,
    temperature: float,
) -> None: ...
def mhc_mix(
    mix: int, h: int, kind: int, rows: int, count: int, hidden: int, fn: int, eps: float, num_threads: int
) -> None: ...
def mhc_split(
    pre: int,
    post: int,
    comb: int,
    mix: int,
    rows: int,
    count: int,
    scale: int,
    base: int,
    iters: int,
    eps: float,
    num_threads: int,
) -> None: ...
def mhc_apply(out: int, h: int, kind: int, rows: int, count: int, hidden: int, pre: int, num_threads: int) -> None: ...
def mhc_step(
    out: int,
    y: int,
    y_kind: int,
    h: int,
    kind: int,
    rows: int,
    count: int,
    hidden: int,
    post: int,
    comb: int,
    read: int,
    fn: int,
    scale: int,
    base: int,
    iters: int,
    hc_eps: float,
    norm_weight: int,
    norm_kind: int,
    norm_eps: float,
    normed: int,
    next_pre: int,
    next_post: int,
    next_comb: int,
    num_threads: int,
) -> None: ...
def moe_gate(
    expert_ids: int,
    weights: int,
    logits: int,
    rows: int,
    experts: int,
    bias: int,
    image_bias: int,
    image_mask: int,
    k: int,
    scale: float,
    num_threads: int,
) -> None: ...
def dispatch(
    expert_ids: int,
    weights: int,
    tokens: int,
    k: int,
    experts: int,
    row_weights: int,
    psum: int,
    slot_to_row: int,
    x: int,
    row_bytes: int,
    rows: int,
    scales: int,
    scale_row_bytes: int,
    row_scales: int,
) -> None: ...
def swiglu(
    out: int,
    codes: int,
    scales: int,
    fmt: int,
    gate: int,
    gate_stride: int,
    up: int,
    up_stride: int,
    kind: int,
    rows: int,
    n: int,
    limit: float,
    row_weight: int,
    num_threads: int,
) -> None: ...
def combine(
    out: int,
    out_kind: int,
    y: int,
    kind: int,
    num_rows: int,
    slot_to_row: int,
    tokens: int,
    k: int,
    n: int,
    bias: int,
    bias_kind: int,
    num_threads: int,
) -> None: ...
def rms_norm(
    out: int,
    x: int,
    kind: int,
    rows: int,
    n: int,
    weight: int,
    weight_kind: int,
    eps: float,
    codes: int,
    scales: int,
    fmt: int,
    num_threads: int,
) -> None: ...
def rope(
    out: int,
    x: int,
    kind: int,
    rows: int,
    heads: int,
    dim: int,
    positions: int,
    table: int,
    table_rows: int,
    table_width: int,
    conjugate: bool,
    normalise: bool,
    eps: float,
    codes: int,
    scales: int,
    fmt: int,
    num_threads: int,
) -> None: ...
def quantize(codes: int, scales: int, fmt: int, x: int, kind: int, rows: int, n: int, num_threads: int) -> None: ...
def dequantize(out: int, kind: int, codes: int, scales: int, fmt: int, rows: int, n: int, num_threads: int) -> None: ...
def scores_paged(
    out: int,
    rows: int,
    columns: int,
    q: int,
    q_scales: int,
    q_kind: int,
    heads: int,
    dim: int,
    cache_args: _Cache,
    weights: int,
    weights_kind: int,
    visible: int,
    table: int,
    sequences: int,
    table_columns: int,
    row_to_seq: int,
    num_threads: int,
) -> None: ...
def scores_blocks(
    out: int,
    rows: int,
    num_blocks: int,
    candidate_block: int,
    q: int,
    q_scales: int,
    q_kind: int,
    heads: int,
    dim: int,
    cache_args: _Cache,
    weights: int,
    weights_kind: int,
    visible: int,
    block_ids: int,
    table: int,
    sequences: int,
    table_columns: int,
    row_to_seq: int,
    num_threads: int,
) -> None: ...
def scores_ragged(
    out: int,
    rows: int,
    columns: int,
    q: int,
    q_scales: int,
    q_kind: int,
    heads: int,
    dim: int,
    k: int,
    k_scales: int,
    k_kind: int,
    num_keys: int,
    weights: int,
    weights_kind: int,
    starts: int,
    ends: int,
    num_threads: int,
) -> None: ...
def topk(out: int, k: int, x: int, kind: int, rows: int, columns: int, lens: int, num_threads: int) -> None: ...
def block_max(
    scores: int, counts: int, logits: int, rows: int, columns: int, lens: int, block: int, num_threads: int
) -> None: ...
def window_slots(
    out: int,
    positions: int,
    row_to_seq: int,
    rows: int,
    tables: int,
    sequences: int,
    pages: int,
    first_page: int,
    window_page: int,
    window: int,
) -> None: ...
def positions_to_slots(
    indices: int, rows: int, width: int, block_size: int, table: int, sequences: int, columns: int, row_to_seq: int
) -> None: ...
def blocks_to_positions(
    out: int, indices: int, rows: int, width: int, blocks: int, num_blocks: int, block: int
) -> None: ...
def dense_index(out: int, visible: int, rows: int, columns: int) -> None: ...
def visible_lens(out: int, positions: int, rows: int, ratio: int) -> None: ...
def advance_step(numbers: tuple[int, ...], ratios: tuple[int, ...]) -> None: ...

# sampling: NumPy arrays, C-contiguous; `out` and what follows it in `token_logprobs` and `verify` are written

def apply_bitmask(logits: _Floats, mask: _Ints, rows: _Ints, num_threads: int) -> None: ...
def process_logits(
    logits: _Floats,
    temperature: _Floats,
    top_k: _Ints,
    top_p: _Floats,
    min_p: _Floats,
    out: _Floats,
    num_threads: int,
) -> None: ...
def sample(
    logits: _Floats,
    temperature: _Floats,
    top_k: _Ints,
    top_p: _Floats,
    min_p: _Floats,
    seeds: _Seeds,
    output_index: _Ints,
    choice: _Ints,
    purpose: int,
    anchor: _Ints,
    out: _Ints,
    num_threads: int,
) -> None: ...
def token_logprobs(
    logits: _Floats,
    tokens: _Ints,
    num_top: int,
    logprob: _Floats,
    rank: _Ints,
    top_ids: _Ints,
    top_logprobs: _Floats,
    num_threads: int,
) -> None: ...
def verify(
    logits: _Floats,
    cu_seqlens: _Ints,
    draft_ids: _Ints,
    temperature: _Floats,
    top_k: _Ints,
    top_p: _Floats,
    min_p: _Floats,
    seeds: _Seeds,
    output_index: _Ints,
    choice: _Ints,
    draft_logits: _Floats,
    num_emitted: _Ints,
    tokens: _Ints,
    num_threads: int,
) -> None: ...
