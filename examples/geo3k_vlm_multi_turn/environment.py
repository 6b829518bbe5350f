"""What an environment is that a model talks to for some turns, and a module of environments.

A module has `build_env(sample, args)`, which returns an environment of its own for a sample. What of it waits for others should
be `async`, `build_env` too: all dialogues of a run share one event loop.
"""

import inspect
from typing import Any, Protocol


class Environment(Protocol):
    """An environment of one dialogue. Observations are its own; only `format_observation` has to know them."""

    def reset(self) -> tuple[Any, dict[str, Any]]:
        """(observation, information) at the start. The observation is said behind the prompt; None: the prompt is all."""

    def step(self, said: str) -> tuple[Any, bool, dict[str, Any]]:
        """(observation, whether the dialogue is over, information) after a turn of the model, `said` without its end mark."""

    def format_observation(self, observation: Any) -> dict[str, Any]:
        """An observation as a chat message, whose content is a text or parts, images among them."""


async def finished(value: Any) -> Any:
    """What a function returned, awaited where it is to be."""
    return await value if inspect.isawaitable(value) else value
