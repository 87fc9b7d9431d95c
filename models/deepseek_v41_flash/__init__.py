"""DeepSeek-V4.1-Flash: configuration, weights, chat format and forward pass."""
