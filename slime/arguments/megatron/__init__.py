"""What Megatron's flags are called, what each does here, and the values derived for it."""
