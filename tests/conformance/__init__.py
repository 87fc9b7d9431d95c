"""The conformance suite: what a backend must do, as cases that run anywhere.

`deepinfer conformance --backend NAME` and `pytest --pyargs deepinfer.conformance --backend NAME` run the same cases.
Everything hangs on the op contracts of `deepinfer.ops`; this package knows how to hold an implementation against them
(`runner`), how to prove that a row does not depend on its batch (`determinism`, `batches`, `sequences`), how to run a
whole layer (`layers`), and how to say what came out (`report`, `html`, `claims`).
"""
