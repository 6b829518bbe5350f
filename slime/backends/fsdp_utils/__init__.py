"""Training with PyTorch's FSDP2 and models of transformers."""
