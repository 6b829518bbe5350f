"""A problem of geometry: the model may look closer at its figure, and is told where an answer is wrong.

    <zoom>left,top,right,bottom</zoom>    a part of the figure, in percent of its width and height; it is shown larger
    \\boxed{…}                             an answer: the dialogue is over where it is right

A turn that has both is an answer. An answer is graded as the whole response is: by its row's reward, or else the run's. Where
there is a figure, the rules are told behind the prompt.
"""

import asyncio
import copy
import re
from typing import Any

from PIL import Image

from slime.rollout.generation_call import current_call
from slime.rollout.rm_hub import async_rm
from slime.utils.processing_utils import images_of, process_vision_info
from slime.utils.types import Sample

ZOOM = re.compile(r"<zoom>\s*(\d{1,3})\s*,\s*(\d{1,3})\s*,\s*(\d{1,3})\s*,\s*(\d{1,3})\s*</zoom>")
RULES = (
    "You may look closer at the figure before you answer: <zoom>left,top,right,bottom</zoom>, in percent of its width and "
    "height, shows a part of it larger. The answer, in \\boxed{}, ends a turn as well."
)
WRONG = "That is not the answer. Look again, and give another one in \\boxed{}."
NEITHER = "This was neither an answer in \\boxed{} nor a part of the figure in <zoom></zoom>."
NO_PART = "There is no such part of the figure: give left, top, right and bottom in percent, from 0 to 100."
# Percent of a side: less shows hardly anything.
LEAST = 5


def part_of(said: str) -> tuple[int, int, int, int] | None:
    """(left, top, right, bottom) in percent of the last part that a turn asks for; None where it is none of a figure."""
    asked = ZOOM.findall(said)
    if not asked:
        return None
    left, top, right, bottom = map(int, asked[-1])
    fits = right - left >= LEAST and bottom - top >= LEAST and max(right, bottom) <= 100
    return (left, top, right, bottom) if fits else None


def enlarged(figure: Image.Image, part: tuple[int, int, int, int]) -> Image.Image:
    """A part of a figure, as large as the figure's sides allow."""
    left, top, right, bottom = (
        round(percent * side / 100) for percent, side in zip(part, 2 * figure.size, strict=True)
    )
    shown = figure.crop((left, top, max(right, left + 1), max(bottom, top + 1)))
    scale = min(figure.width / shown.width, figure.height / shown.height)
    size = tuple(max(1, round(side * scale)) for side in shown.size)
    return shown.resize(size, Image.Resampling.BICUBIC)


class Geo3kEnvironment:
    """Answers turns about the first figure of a problem; one without figures has nothing to look closer at."""

    def __init__(self, sample: Sample, args: Any) -> None:
        self._args, self._sample, self._sources = args, sample, images_of(sample)
        self._looks = 0

    def reset(self) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        return {"text": RULES} if self._sources else None, {"looks": 0, "right": False}

    async def step(self, said: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """The observation has a `text`, and where a part of the figure is shown an `image`."""
        observation, is_right = {"text": NEITHER}, False
        if "\\boxed" in said:
            is_right = await self._is_right(said)
            observation = {"text": WRONG}
        elif "<zoom>" in said:
            part = part_of(said)
            observation = {"text": NO_PART}
            if part is not None and self._sources:
                self._looks += 1
                image = await asyncio.to_thread(self._look_at, part)
                observation = {"text": "This part of the figure:", "image": image}
        return observation, is_right, {"looks": self._looks, "right": is_right}

    def format_observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        if "image" not in observation:
            return {"role": "user", "content": observation["text"]}
        shown = [{"type": "text", "text": observation["text"]}, {"type": "image", "image": observation["image"]}]
        return {"role": "user", "content": shown}

    def _look_at(self, part: tuple[int, int, int, int]) -> Image.Image:
        content = [{"type": "image", "image": self._sources[0]}]
        [figure] = process_vision_info([{"role": "user", "content": content}], None)["images"]
        return enlarged(figure, part)

    async def _is_right(self, said: str) -> bool:
        args, answer, evaluation = self._args, copy.copy(self._sample), current_call().evaluation
        answer.response = said
        reward = await async_rm(args, answer, evaluation=evaluation)
        key = args.eval_reward_key or args.reward_key if evaluation else args.reward_key
        return (reward[key] if isinstance(reward, dict) else reward) > 0


def build_env(sample: Sample, args: Any) -> Geo3kEnvironment:
    """The environment of a sample."""
    return Geo3kEnvironment(sample, args)
