"""Implementations of the op contracts, one package per device family."""
