"""`--custom-rm-path`: reward functions and classes of the user, in the form their signature shows.

Forms: single `fn(args, sample, **kw)`; batch `fn(args, samples, **kw)`, told by the name of the second parameter (with
`--group-rm` also when that name is neither `sample` nor `samples`); class with
`compute_reward(prompts, responses[, labels, samples])`.

Every call gets copies of the samples. One beyond `--rm-timeout` is made once more; a plain function may then run twice at once.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slime.rollout.user_functions import (
    CallTimedOut,
    accepted_keywords,
    call_user_function,
    describe_samples,
    is_batch_form,
    parameter_names,
    wrong_result_error,
)
from slime.utils.plugin_loader import load_function
from slime.utils.types import Sample
from slime.utils.user_code import user_function_error

FLAG = "--custom-rm-path"

_instances: dict[type, Any] = {}


def clear_reward_instances() -> None:
    """Forget the constructed class-style rewards."""
    _instances.clear()


@dataclass(frozen=True)
class CustomReward:
    """A reward of the user, by path."""

    path: str
    args: Any

    @cached_property
    def _loaded(self) -> Any:
        return load_function(self.path, flag=FLAG, batched=self.args.group_rm)

    @property
    def source(self) -> str:
        return f"{FLAG} {self.path}"

    @property
    def takes_batch(self) -> bool:
        """Whether one call grades a list."""
        function = self._loaded
        if inspect.isclass(function) or is_batch_form(function):
            return True
        return bool(self.args.group_rm) and parameter_names(function)[1:2] != ["sample"]

    async def grade_one(self, sample: Sample, timeout: float | None, keywords: dict[str, Any]) -> Any:
        """The raw reward of one sample."""
        if self.takes_batch:
            return (await self.grade_batch([sample], timeout, keywords))[0]
        return await self._call(self._loaded, [sample], timeout, keywords, self.args, sample)

    async def grade_batch(self, samples: list[Sample], timeout: float | None, keywords: dict[str, Any]) -> list[Any]:
        """The raw rewards of `samples` by one call of a batch form."""
        if inspect.isclass(self._loaded):
            rewards = await self._grade_with_class(samples, timeout)
        else:
            rewards = await self._call(self._loaded, samples, timeout, keywords, self.args, samples)
        if hasattr(rewards, "tolist") and not isinstance(rewards, list):
            rewards = rewards.tolist()
        if not isinstance(rewards, list | tuple) or len(rewards) != len(samples):
            expected = f"a list of {len(samples)} rewards, one per sample"
            raise wrong_result_error(FLAG, self.path, describe_samples(samples), rewards, expected)
        return list(rewards)

    async def _grade_with_class(self, samples: list[Sample], timeout: float | None) -> Any:
        if self._loaded not in _instances:
            model_path = getattr(self.args, "rm_model_path", None) or getattr(self.args, "hf_checkpoint", None)
            offered = {"args": self.args, "model_path": model_path}
            # Constructed on the event loop, once, so that concurrent first calls cannot construct it twice.
            _instances[self._loaded] = self._construct(offered, samples)
        compute_reward = _instances[self._loaded].compute_reward
        offered = {"labels": [sample.label for sample in samples], "samples": samples}
        keywords = accepted_keywords(compute_reward, offered)
        prompts, responses = [sample.prompt for sample in samples], [sample.response for sample in samples]
        return await self._call(compute_reward, samples, timeout, keywords, prompts, responses)

    def _construct(self, offered: dict[str, Any], samples: list[Sample]) -> Any:
        try:
            return self._loaded(**accepted_keywords(self._loaded, offered))
        except Exception as error:
            raise user_function_error(FLAG, self.path, f"{describe_samples(samples)} (constructor)", error) from error

    async def _call(
        self,
        function: Callable[..., Any],
        samples: list[Sample],
        timeout: float | None,
        keywords: dict[str, Any],
        *arguments: Any,
    ) -> Any:
        accepted = accepted_keywords(function, keywords)
        try:
            return await call_user_function(
                function,
                *arguments,
                source=self.source,
                at_a_time=self.args.rm_concurrency,
                timeout=timeout,
                keywords=accepted,
            )
        except CallTimedOut:
            raise
        except Exception as error:
            raise user_function_error(FLAG, self.path, describe_samples(samples), error) from error
