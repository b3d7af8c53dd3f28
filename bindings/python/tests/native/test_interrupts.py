"""An exception of a signal's handler at each moment at which a block begins or ends: the lease is released, or collected."""

import dis
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import leasehold

PACKAGE = str(Path(leasehold.__file__).parent)


class Interrupted(Exception):
    pass


class Interrupter:
    """Raises at the n-th moment at which the interpreter runs signal handlers: when a function of the package begins, and after it has called one of C."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.moments: list[str] = []
        self._after_call: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        self._after_call = None
        frame.f_trace_opcodes = True
        # What a finalizer raises is printed.
        if frame.f_code.co_name != "__del__":
            self._moment(frame, "begins")
        return self._trace

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode" and frame.f_code.co_name != "__del__":
            if self._after_call is frame:
                self._moment(frame, "goes on")
            operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            self._after_call = frame if operation.startswith("CALL") else None
        return self._trace

    def _moment(self, frame: FrameType, what: str) -> None:
        self.moments.append(f"{frame.f_code.co_qualname} {what} at line {frame.f_lineno}")
        if len(self.moments) - 1 == self.at:
            raise Interrupted


def run(work: Callable[[], None], at: int | None = None) -> list[str]:
    interrupter = Interrupter(at)
    before = sys.gettrace()
    sys.settrace(interrupter)
    try:
        work()
    except Interrupted:
        pass
    finally:
        sys.settrace(before)
    return interrupter.moments


@pytest.fixture
def clients() -> Iterator[tuple[leasehold.Client, leasehold.Client]]:
    with leasehold.connect("memory:interrupts") as client, leasehold.connect("memory:interrupts") as other:
        yield client, other


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("block", ["lease", "lock", "try_lock", "decorator"])
def test_interrupted_block_holds_nothing(clients: tuple[leasehold.Client, leasehold.Client], block: str) -> None:
    client, other = clients

    def work() -> None:
        match block:
            case "lease":
                with client.lock("orders").acquire():
                    pass
            case "lock":
                with client.lock("orders"):
                    pass
            case "try_lock":
                with client.try_lock("orders"):
                    pass
            case _:
                decorated()

    decorated = client.locked("orders")(int)
    work()
    count = len(run(work))
    assert count > 30
    for moment in range(count):
        moments = run(work, moment)
        gc.collect()
        try:
            with other.lock("orders", wait=2):
                pass
        except leasehold.Timeout:
            pytest.fail(f"held after {moments[-1]}")
        assert leasehold.current() is None
