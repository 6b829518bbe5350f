"""A calculator that the model asks: `<calc>47*38</calc>` ends a turn, and the reply is a message of the role `tool`."""

import operator
import re

from slime.rollout.dialogue import dialogue

CALL = re.compile(r"<calc>\s*(-?\d{1,12})\s*([-+*])\s*(-?\d{1,12})\s*</calc>")
# A turn ends behind it, so that the model cannot go on with a result of its own invention.
STOP = "</calc>"
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def reply(said: str) -> dict[str, str] | None:
    """The result of the last calculation that was asked for; a call that cannot be read is told so.

    Calls in thoughts that are over, and those before an answer, ask for nothing.
    """
    asked = said.rpartition("</think>")[2].rpartition("\\boxed")[2]
    calls = CALL.findall(asked)
    if calls:
        left, sign, right = calls[-1]
        return {"role": "tool", "content": str(OPERATORS[sign](int(left), int(right)))}
    return {"role": "tool", "content": "error"} if "<calc>" in asked else None


async def generate(args, sample, sampling_params):
    """An answer of as many turns as the model takes, `--max-turns` at most."""
    stop = [*(sampling_params.get("stop") or []), STOP]
    return await dialogue(args, sample, {**sampling_params, "stop": stop}, reply)
