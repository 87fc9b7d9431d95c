"""Time to look up a long prompt in the prefix index, next to hashing the same bytes.

    python benchmarks/prefix_lookup.py [--tokens 1000000] [--repeat 9]

Prints the median milliseconds of `match` (which changes nothing) and of `open` with `close` (which adopts the blocks
and gives them back) for a prompt that is stored as a whole, and for one whose first block differs; then their ratio to
`hashlib.blake2b` over the prompt's bytes, measured in the same run. Needs no accelerator.
"""

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable

import numpy as np

from deepinfer.core.kv_blocks import KVBlockManager
from deepinfer.core.step_buffers import Int32Array

BLOCK, PAGE, WINDOW, CHUNK = 128, 32, 128, 8192


def store(kv: KVBlockManager, tokens: Int32Array) -> float:
    """Enter a prompt into the index, chunk by chunk as prefill does; the mean microseconds of a chunk's commit."""
    seq = kv.open(tokens, use_prefix=True)
    seqs, spent, ends = np.array([seq], np.int32), 0.0, range(CHUNK, len(tokens) + CHUNK, CHUNK)
    for end in ends:
        stop = np.array([min(end, len(tokens))], np.int32)
        kv.reserve(seq, int(stop[0]))
        begin = time.perf_counter()
        kv.commit(seqs, stop)
        spent += time.perf_counter() - begin
    kv.free(seq)
    return spent / len(ends) * 1e6


def median_ms(call: Callable[[], object], repeat: int) -> float:
    """Median milliseconds of a call."""
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()
    tokens = np.random.default_rng(0).integers(0, 129_280, args.tokens, dtype=np.int32)
    other = tokens.copy()
    other[0] += 1
    kv = KVBlockManager(
        2 * (args.tokens // BLOCK + 2),
        BLOCK,
        num_window_pages=4 * (CHUNK + WINDOW) // PAGE,
        window_page=PAGE,
        window=WINDOW,
        prefix_caching=True,
    )
    commit_us = store(kv, tokens)
    found = kv.match(tokens).num_tokens
    assert found >= args.tokens - BLOCK, found
    assert kv.match(other).num_tokens == 0
    hash_ms = median_ms(lambda: hashlib.blake2b(tokens).digest(), args.repeat)
    print(f"{args.tokens} tokens, block {BLOCK}, {found} stored; median of {args.repeat}")
    print(f"blake2b of the bytes   {hash_ms:8.3f} ms")
    for name, call in (
        ("match, all stored", lambda: kv.match(tokens)),
        ("match, none stored", lambda: kv.match(other)),
        ("open and close, stored", lambda: kv.free(kv.open(tokens, use_prefix=True))),
    ):
        ms = median_ms(call, args.repeat)
        print(f"{name:22} {ms:8.3f} ms, {ms / hash_ms:6.3f} of blake2b")
    print(f"commit of {CHUNK} rows    {commit_us:8.1f} us")


if __name__ == "__main__":
    main()
