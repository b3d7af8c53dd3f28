"""Writes a report, one process at a time. The database refuses what a former holder writes late.

    python report.py sqlite:locks.db report.db      # start it several times
"""

import sqlite3
import sys
import time

import leasehold


def write(database: sqlite3.Connection, lease: leasehold.Lease, text: str) -> None:
    """A write with the fencing token: a holder with a higher one has been here if no row is changed."""
    with database:
        changed = database.execute(
            "UPDATE report SET body = ?, fence = ? WHERE fence <= ?", (text, lease.token, lease.token)
        ).rowcount
    if changed == 0:
        raise SystemExit("another process has the lock by now")


def main(store: str, file: str, rounds: int = 3) -> None:
    database = sqlite3.connect(file, timeout=30)
    with database:
        database.execute("CREATE TABLE IF NOT EXISTS report (id INTEGER PRIMARY KEY, body TEXT, fence INTEGER)")
        database.execute("INSERT OR IGNORE INTO report VALUES (1, '', 0)")
    with leasehold.connect(store) as client:
        for number in range(rounds):
            with client.lock("report", ttl=10, wait=60) as lease:
                lease.on_lost(lambda reason: print("the work should stop:", reason))
                time.sleep(0.2)  # the work
                lease.check()
                write(database, lease, f"round {number}")
                print("written with token", lease.token, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
