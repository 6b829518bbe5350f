"""Megatron's flags: their names, their effects in this trainer, and the values derived for them."""
