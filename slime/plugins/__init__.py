"""Tries users' functions without a run: `python -m slime.plugins check --custom-rm-path my_reward.py`.

The check is a step of a run without a model: the framework's own code calls the functions, with arguments from the real
parser, a data source of four sums and an engine that answers every request with one text. So what a run refuses a check refuses
too, in the same words; and it tells of what nothing in a run would show.
"""

from slime.plugins.check import Finding, check
from slime.utils.plugin_points import POINTS

__all__ = ["POINTS", "Finding", "check"]
