"""From kernel text to a running device: bisheng, AscendCL, torch_npu and HCCL, each imported where it is needed."""
