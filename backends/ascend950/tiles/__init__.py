"""Kernels written in TileLang, lowered to the Ascend C text that is pinned in `kernels/generated`.

Definitions are read when text is made anew, never by an engine: `python -m deepinfer.backends.ascend950.tiles.lower`.
"""
