"""The engine: scheduler, KV blocks and pages, sampler, executor. Knows no vendor and one model protocol."""
