"""Writes a report again and again, one worker at a time. The session's heartbeat keeps the lease while the work lasts."""
import json, os, threading, time, urllib.error, urllib.request


HEARTBEAT = 10  # seconds: without a heartbeat for as long, the session ends


def call(path, timeout=None, **body):
    headers = {"Authorization": "Bearer " + os.environ["LEASEHOLD_TOKEN"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["LEASEHOLD_URL"] + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read() or "null")


def beat(session):
    while True:
        time.sleep(2)
        try:
            # An answer that takes longer is too late: the last heartbeat was 2 s before.
            call(f"/v1/sessions/{session}/heartbeat", timeout=HEARTBEAT / 2)
        except Exception as error:
            print("the session has ended, or the server is gone:", error, flush=True)
            os._exit(1)  # the work must not go on without the lock


session = call("/v1/sessions", heartbeat_ms=HEARTBEAT * 1000, label="report worker")["session"]
threading.Thread(target=beat, args=[session], daemon=True).start()
for _ in range(int(os.environ.get("ROUNDS", "1000000"))):
    grant = call("/v1/locks/mutex/report/acquire", session=session, wait_ms=600_000)
    print("working with token", grant["token"], flush=True)
    time.sleep(float(os.environ.get("WORK_SECONDS", "2")))
    call("/v1/locks/mutex/report/release", lease=grant["lease"])
