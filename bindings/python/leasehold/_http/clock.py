"""The clock of leases: seconds that pass also while the host sleeps, as far as the system has such a clock."""

import sys
import time
from collections.abc import Callable


def _clock() -> Callable[[], float]:
    if hasattr(time, "CLOCK_BOOTTIME"):  # Linux, where CLOCK_MONOTONIC stands still while the host sleeps
        boottime = time.CLOCK_BOOTTIME
        return lambda: time.clock_gettime(boottime)
    if sys.platform == "darwin":  # `time.monotonic` stands still there, and CLOCK_MONOTONIC does not
        monotonic = time.CLOCK_MONOTONIC
        return lambda: time.clock_gettime(monotonic)
    return time.monotonic


now: Callable[[], float] = _clock()
