import json, os, urllib.request

def call(path, **body):
    headers = {"Authorization": "Bearer " + os.environ["LEASEHOLD_HTTP_TOKEN"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["LEASEHOLD_URL"] + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:  # raises HTTPError, whose body names the remedy
        return json.loads(answer.read() or "null")

grant = call("/v1/locks/mutex/nightly-report/acquire", wait_ms=60_000, ttl_ms=30_000)
print("token", grant["token"])  # the work; it must end within expires_in_ms, or renew the lease
call("/v1/locks/mutex/nightly-report/release", lease=grant["lease"])
