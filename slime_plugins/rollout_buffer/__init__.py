"""The rollout buffer: an HTTP service between generators, which make trajectories in a process of their own, and a run.

    python -m slime_plugins.rollout_buffer --generator my_generator.py
    python train.py … --rollout-function-path slime_plugins.rollout_buffer.rollout.generate_rollout \\
        --rollout-buffer-url http://127.0.0.1:8889 --rollout-task-type my_task

Items come in one by one and leave in whole groups: `items` says what an item is, `store` keeps them, `service` is the server,
`generators` finds the modules that make them, `generator_process` runs one, `base_generator` is a start for one's own,
`math_generator` a whole one, `rollout` is the side of the run. Nothing in `slime` imports this package.
"""
