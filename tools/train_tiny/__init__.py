"""Training of the small checkpoint: `python -m tools.train_tiny --out DIR`, from the root of the repository.

The model is DeepSeek-V4.1 with every kind of layer, written for gradients: `model` and `draft` follow the specification
in plain PyTorch, `rounding` passes gradients through the storage formats, and `export` writes what the engine loads.
Every batch follows from (seed, step) in one tree under one Python, whose documentation is the natural text; so a run
that stops and resumes there gives the weights of one that did not.
"""
