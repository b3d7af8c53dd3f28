"""Writes a report again and again, one worker at a time. A thread renews the lease while the work lasts."""
import http.client, json, os, secrets, threading, time, urllib.error, urllib.request


TTL = 30  # seconds: at least three times the longest time without a server
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # it goes on while the host sleeps


def now():
    return time.clock_gettime(CLOCK)


def call(path, timeout, **body):
    """Sends a request until a server answers it: the answer, and when it was sent."""
    headers = {"Authorization": "Bearer " + os.environ["LEASEHOLD_HTTP_TOKEN"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["LEASEHOLD_URL"] + path, json.dumps(body).encode(), headers)
    while True:
        sent = now()
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return json.loads(answer.read()), sent
        except urllib.error.HTTPError as error:
            if error.code not in (429, 502, 503, 504):
                raise
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.2)  # a waiting request that is repeated within 2 s keeps its place


def stop(why):
    print("the work stops:", why, flush=True)
    os._exit(1)  # it must not go on without the lock


class Lease:
    """A lease with a thread that renews it, and one that ends the program when the lease may have ended."""

    def __init__(self, grant, sent):
        self.id, self.token = grant["lease"], grant["token"]
        self.good_until = sent + grant["expires_in_ms"] / 1000
        self.released = threading.Event()
        threading.Thread(target=self.renew, daemon=True).start()
        threading.Thread(target=self.stop_in_time, daemon=True).start()

    def renew(self):
        while not self.released.wait(TTL / 3):
            answer, sent = call("/v1/leases/renew", timeout=5, leases=[self.id])
            renewed = answer["leases"][0]
            if renewed["outcome"] == "renewed":
                self.good_until = sent + renewed["expires_in_ms"] / 1000
            elif renewed["outcome"] != "unknown" and not self.released.is_set():
                stop(f"the lease has ended: {renewed['detail']}")

    def stop_in_time(self):
        while not self.released.wait(0.05):
            if now() > self.good_until:
                stop("the lease was not renewed in time")

    def release(self):
        self.released.set()
        call("/v1/leases/release", timeout=15, leases=[self.id])


def acquire(name):
    """Waits for a lock, in slices. A request that got no server in time has lost its place, and a new one begins."""
    while True:
        request_id, answer = secrets.token_hex(16), {}
        try:
            while "lease" not in answer:
                path = f"/v1/locks/mutex/{name}/acquire"
                answer, sent = call(path, timeout=60, request_id=request_id, wait_ms=40_000, ttl_ms=TTL * 1000)
            return Lease(answer, sent)
        except urllib.error.HTTPError as error:
            if error.code != 410:
                raise


for _ in range(int(os.environ.get("ROUNDS", "1000000"))):
    lease = acquire("report")
    print("working with token", lease.token, flush=True)
    time.sleep(float(os.environ.get("WORK_SECONDS", "2")))
    lease.release()
