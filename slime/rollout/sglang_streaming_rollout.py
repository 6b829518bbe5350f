"""Public import path of streaming generation; its home is `slime.rollout.generation`."""

from slime.rollout.generation import generate_streaming as generate_streaming
