"""Models: configuration, weights and forward passes that call ops only."""
