"""Structured output: what a request may ask of its answer's form, and the masks that hold the model to it.

A request's wish (`spec`) becomes the text of a grammar (`source`, `json_schema`), a worker process compiles it
(`compiler`, `worker`), and from then on a `GrammarShaper` (`shaper`) says which tokens may come next, for all
constrained rows of a step at once (`masks`). Only `matching` and `worker` know the library that does the matching.
"""
