"""What the children of the tests of multiprocessing do."""

import leasehold


def take_turns(url: str, name: str) -> None:
    """Takes a few turns, and ends with a lease that is not released."""
    client = leasehold.connect(url)
    for _ in range(5):
        with client.lock(name, wait=60) as lease:
            lease.check()
    kept = client.lock(name, wait=60).acquire()
    kept.check()
