"""From logits to chosen tokens: the noise and the shaping of the target's law. Pure functions; imports types only."""
