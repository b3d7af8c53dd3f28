"""The native engine is one for the process, and its end is the process's."""

import importlib
import subprocess
import sys

import pytest

PROGRAM = """
import importlib, sys
import leasehold

interpreters = importlib.import_module(sys.argv[1])
client = leasehold.connect("memory:")
with client.lock("orders") as lease:
    lease.on_lost(print)
    for _ in range(2):
        try:
            child = interpreters.create("legacy")
        except (TypeError, ValueError):
            child = interpreters.create(isolated=False)
        failure = interpreters.run_string(child, f'''
import sys
sys.path[:0] = {sys.path!r}
import leasehold
try:
    leasehold.connect("memory:").lock("orders").try_acquire()
except leasehold.Unsupported as error:
    print(error)
''')
        assert failure is None, failure
        interpreters.destroy(child)
    lease.check()
with client.lock("orders", wait=0):
    pass
"""


def test_sub_interpreter_is_refused_and_its_end_ends_no_lease() -> None:
    for module in ("_interpreters", "_xxsubinterpreters"):
        try:
            importlib.import_module(module)
        except ImportError:
            continue
        done = subprocess.run([sys.executable, "-c", PROGRAM, module], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("stores need the main interpreter") == 2
        return
    pytest.fail("this Python has no sub-interpreters")
