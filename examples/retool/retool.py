"""Answers with programs: `<code>…</code>` ends a turn, and what the program prints is a message of the role `tool`.

--custom-generate-function-path examples/retool/retool.py:generate --max-turns 4
"""

import re

from examples.retool.sandbox import run_python
from slime.rollout.dialogue import dialogue
from slime.utils.async_utils import slots

CODE = re.compile(r"<code>(.*?)</code>", re.DOTALL)
FENCE = re.compile(r"\A\s*```(?:python|py)?\n(.*?)```\s*\Z", re.DOTALL)
# A turn ends behind it, so that the model cannot go on with an output of its own invention.
STOP = "</code>"
PROGRAMS_AT_A_TIME = 32


def program_of(said: str) -> str | None:
    """The last program of a turn, without the fence of Markdown."""
    # Without what follows the last end: there, each begin would be a search through all of the rest.
    found = CODE.findall("".join(said.rpartition(STOP)[:2]))
    if not found:
        return None
    fenced = FENCE.match(found[-1])
    return fenced[1] if fenced else found[-1]


async def reply(said: str) -> dict[str, str] | None:
    """What the program printed; None where there is none: the dialogue is over."""
    program = program_of(said)
    if program is None:
        return None
    async with slots("retool", PROGRAMS_AT_A_TIME):
        return {"role": "tool", "content": await run_python(program) or "[no output]"}


async def generate(args, sample, sampling_params):
    """An answer of as many turns as the model takes, `--max-turns` at most."""
    stop = [*(sampling_params.get("stop") or []), STOP]
    return await dialogue(args, sample, {**sampling_params, "stop": stop}, reply)
