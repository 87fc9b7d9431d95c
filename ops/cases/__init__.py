"""Conformance cases, a file per op family; each op's definition names its own generator from here."""
