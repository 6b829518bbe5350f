"""The rollout buffer: an HTTP service between generators, which make trajectories in a process of their own, and a run.

    python -m slime_plugins.rollout_buffer --generator my_generator.py
    python train.py … --rollout-function-path slime_plugins.rollout_buffer.rollout.generate_rollout \\
        --rollout-buffer-url http://127.0.0.1:8889 --rollout-task-type my_task

Items come in one by one and leave in whole groups. `items` says what an item is, `store` keeps items, `service` is the server,
`generators` finds the modules that make items, `generator_process` runs one of them, `base_generator` is a base for one's own,
`math_generator` is a complete one, and `rollout` is the run's side. Nothing in `slime` imports this package.
"""
