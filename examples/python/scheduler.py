"""A scheduler that runs on one of many hosts: the others take over when it ends or crashes.

    python scheduler.py redis://127.0.0.1           # start it on several hosts
"""

import asyncio
import socket
import sys

import leasehold


async def work(client: leasehold.aio.Client, rounds: int) -> None:
    for _ in range(rounds):
        # Of all leaders within this second, one starts the work.
        async with client.once_per("tick", 1) as tick:
            if tick:
                print("tick", tick.token, flush=True)
        await asyncio.sleep(0.5)


async def main(store: str, rounds: int = 6) -> None:
    async with leasehold.aio.connect(store, label=socket.gethostname()) as client:
        try:
            # The body is cancelled when the leadership is lost.
            async with client.election("scheduler", ttl=5) as lease:
                print("leader with token", lease.token, flush=True)
                await work(client, rounds)
        except leasehold.LeaseLost as lost:
            print("not the leader any more:", lost.reason)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
