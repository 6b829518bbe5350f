"""Reinforcement-learning post-training for language models on Megatron-Core, SGLang and Ray."""

__version__ = "0.1.0"
