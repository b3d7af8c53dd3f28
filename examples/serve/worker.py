"""Writes a report again and again, one worker at a time. The session's heartbeat keeps the lease while the work lasts."""
import json, os, threading, time, urllib.request


HEARTBEAT = 10  # seconds: without a heartbeat for as long, the session ends
PAUSE = 2  # seconds between two heartbeats


def call(path, timeout=None, **body):
    headers = {"Authorization": "Bearer " + os.environ["LEASEHOLD_HTTP_TOKEN"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["LEASEHOLD_URL"] + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read() or "null")


def stop(why):
    print("the work stops:", why, flush=True)
    os._exit(1)  # it must not go on without the lock


one_beat = threading.Lock()
good_until = time.monotonic() + HEARTBEAT


def beat(session):
    """A heartbeat: until when the session and its leases are good. Times count from before the request, however long its answer takes."""
    global good_until
    with one_beat:
        sent = time.monotonic()
        try:
            answer = call(f"/v1/sessions/{session}/heartbeat", timeout=HEARTBEAT)
        except Exception as error:
            stop(f"the session has ended, or the server is gone: {error}")
        if answer["lost"]:
            stop(f"the lock was lost: {answer['lost']}")
        # A lease that is being released has no time left, and no work.
        leases = [lease["expires_in_ms"] / 1000 for lease in answer["leases"] if lease["expires_in_ms"]]
        good_until = sent + min([HEARTBEAT] + leases)


def beat_again(session):
    while True:
        time.sleep(PAUSE)
        beat(session)


def stop_in_time():
    while time.monotonic() < good_until:
        time.sleep(0.05)
    stop("there was no heartbeat in time")


session = call("/v1/sessions", heartbeat_ms=HEARTBEAT * 1000, label="report worker")["session"]
threading.Thread(target=beat_again, args=[session], daemon=True).start()
threading.Thread(target=stop_in_time, daemon=True).start()
for _ in range(int(os.environ.get("ROUNDS", "1000000"))):
    grant = call("/v1/locks/mutex/report/acquire", session=session, wait_ms=600_000)
    beat(session)  # the request may have waited for long: this says how long the lease is good
    print("working with token", grant["token"], flush=True)
    time.sleep(float(os.environ.get("WORK_SECONDS", "2")))
    call("/v1/locks/mutex/report/release", lease=grant["lease"])
