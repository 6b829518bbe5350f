"""`--rehearse`: one step of chosen ranks at the real size, on fake tensors, by the trainer's own code."""
