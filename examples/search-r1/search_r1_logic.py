"""The same functions under the name that scripts for this task commonly use."""

from generate_with_search import generate, reward_func

__all__ = ["generate", "reward_func"]
