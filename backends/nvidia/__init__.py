"""What the NVIDIA backends share: probe, runtime, Triton kernels and the functions that launch them.

It is no backend of its own. `deepinfer.backends.cuda_sm90` and `cuda_sm100` register these kernels under their names
and add what only their generation has.
"""
