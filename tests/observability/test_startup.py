import re
import time

from slime.observability.startup import StartupClock
from slime.utils.misc import SingletonMeta


def test_stretches_add_up_from_the_start_of_the_process():
    SingletonMeta.clear_instances()
    clock = StartupClock()
    clock.mark("parse")
    time.sleep(0.05)  # the clock measures time, so time must pass
    line = clock.close("first sample")
    total, parse, last = map(float, re.findall(r"[\d.]+", line))
    assert abs(total - parse - last) < 0.11 and total > 0
    assert clock.close("again") is None
    SingletonMeta.clear_instances()
