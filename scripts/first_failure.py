"""Runs a test program until its first failure."""
import os
import signal
import subprocess
import time


def passes(command, cwd, env, output, limit):
    """Whether all tests pass. None if no line is printed for `limit` seconds. `output` is the file for the lines."""
    with open(output, "w") as file:
        test = subprocess.Popen(command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, start_new_session=True)
    passed, last = None, time.monotonic()
    with open(output, errors="replace") as reader:
        while passed is None and time.monotonic() - last < limit:
            time.sleep(0.1)
            ended, lines = test.poll(), reader.readlines()
            if ended is not None:
                passed = ended == 0
            elif any(line.endswith("FAILED\n") for line in lines):
                passed = False
            elif lines:
                last = time.monotonic()
    # Also servers and other processes that the tests have left.
    try:
        os.killpg(test.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    test.wait()
    return passed
