"""How much longer than ``pass`` an import of leasehold takes: the median of interleaved starts of the interpreter, in milliseconds."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time


def started(code: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter() - began) * 1e3


def main() -> int:
    times: dict[str, list[float]] = {"pass": [], "import leasehold": [], "import leasehold; leasehold.connect('memory:').list()": []}
    for _ in range(31):
        for code, own in times.items():
            own.append(started(code))
    base = statistics.median(times.pop("pass"))
    over = {code: statistics.median(own) - base for code, own in times.items()}
    for code, extra in over.items():
        print(f"{code:60} {extra:6.1f} ms beyond pass")
    is_met = over["import leasehold"] <= 20
    print(f"import: <= 20 ms {'met' if is_met else 'MISSED'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
