"""A calculator that the model asks: `<calc>47*38</calc>` ends a turn, and the reply is a message of the role `tool`."""

import operator
import re

from slime.rollout.dialogue import dialogue

CALL = re.compile(r"<calc>\s*(-?\d{1,12})\s*([-+*])\s*(-?\d{1,12})\s*</calc>")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def reply(said: str) -> dict[str, str] | None:
    """The result of the last calculation that was asked for; a call that cannot be read is told so."""
    calls = CALL.findall(said)
    if calls:
        left, sign, right = calls[-1]
        return {"role": "tool", "content": str(OPERATORS[sign](int(left), int(right)))}
    return {"role": "tool", "content": "error"} if "<calc>" in said else None


async def generate(args, sample, sampling_params):
    """An answer of as many turns as the model takes, `--max-turns` at most."""
    return await dialogue(args, sample, sampling_params, reply)
