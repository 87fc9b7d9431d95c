"""Op contracts: what the model needs from hardware, written down once with an executable reference."""
