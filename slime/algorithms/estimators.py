"""Advantage estimators by what they do with rewards. Plain names: the checks of arguments read them too, without numpy."""

# Rewards are centred within their prompt group; the other estimators (ppo, reinforce_plus_plus) take them as they are, since
# a value function or whitening gives them their baseline.
GROUP_CENTERED_ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
# … and divided by the standard deviation of the group, unless --disable-grpo-std-normalization.
GROUP_SCALED_ESTIMATORS = ("grpo", "gspo", "cispo")

# The reward of a token is that of its sample, whatever the KL; without time steps.
SAMPLE_REWARD_ESTIMATORS = ("grpo", "gspo", "cispo")
# Later rewards of a response reach earlier tokens, discounted.
DISCOUNTING_ESTIMATORS = ("ppo", "reinforce_plus_plus")
