#!/usr/bin/env python3
"""Drives the dashboard in a headless Chromium, through its debugging pipe.

    browser.py real URL READ_TOKEN WRITE_TOKEN   a lock of a real program (LEASEHOLD names it): seen, queued, released by force
    browser.py many URL READ_TOKEN               10,000 locks: list, search, keyboard
    browser.py odd URL WRITE_TOKEN               names of hidden characters, `.`, `..` and `%`; a semaphore with three holders
    browser.py shot URL READ_TOKEN FILE [HASH]   a screenshot

Prints what it saw. Ends with an error if something is missing after a bounded wait.
"""
import base64, json, os, select, shutil, subprocess, sys, tempfile, time

LIMIT = 60  # seconds, for a debug build on a busy machine


class Browser:
    def __init__(self):
        program = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
        if not program:
            sys.exit("chromium is missing: run scripts/test install, or apt-get install chromium")
        self.folder = tempfile.mkdtemp(prefix="browser-")
        down, up = os.pipe(), os.pipe()

        def connect():  # the browser reads from descriptor 3 and writes to 4
            ours = os.dup(down[0]), os.dup(up[1])
            os.dup2(ours[0], 3), os.dup2(ours[1], 4)

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions", "--disable-background-networking",
                 "--disable-component-update", "--remote-debugging-pipe", "--window-size=1280,900", "--user-data-dir=" + self.folder, "about:blank"]
        # `close_fds` would close 3 and 4 again.
        self.process = subprocess.Popen([program, *flags], preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(down[0]), os.close(up[1])
        self.to, self.source, self.rest, self.number, self.events = down[1], up[0], b"", 0, []
        self.expected = ["401"]  # answers that are errors
        target = next(one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(domain + ".enable")

    def message(self, until):
        while b"\0" not in self.rest:
            if not select.select([self.source], [], [], max(0, until - time.monotonic()))[0]:
                raise SystemExit("the browser does not answer")
            more = os.read(self.source, 1 << 16)
            if not more:
                raise SystemExit("the browser has ended")
            self.rest += more
        text, self.rest = self.rest.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, **params):
        self.number += 1
        request = {"id": self.number, "method": method, "params": params}
        if hasattr(self, "session"):
            request["sessionId"] = self.session
        data = json.dumps(request).encode() + b"\0"
        while data:
            data = data[os.write(self.to, data):]
        until = time.monotonic() + LIMIT
        while True:
            message = self.message(until)
            if message.get("id") == self.number:
                if "error" in message:
                    raise SystemExit(f"{method}: {message['error']}")
                return message["result"]
            self.events.append(message)

    def value(self, script):
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True)
        if "exceptionDetails" in result:
            raise SystemExit(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def until(self, script, what=None):
        begin = time.monotonic()
        while not self.value(f"!!({script})"):
            if time.monotonic() - begin > LIMIT:
                raise SystemExit(f"after {LIMIT} s still not: {what or script}\n" + self.value("document.body.innerText"))
            time.sleep(0.02)

    def key(self, name, text=None):
        code = {"Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "/": 191}.get(name, 0)
        extra = {"text": text} if text else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, windowsVirtualKeyCode=code, **extra)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, windowsVirtualKeyCode=code)

    def open(self, url, token):
        self.base = url
        self.call("Page.navigate", url=url + "/")
        self.until("document.readyState === 'complete' && typeof connect === 'function'")
        self.login(token)

    def login(self, token):
        self.until("!document.getElementById('login').hidden", "the page asks for a token")
        self.value(f"document.getElementById('token').value = {json.dumps(token)}; document.querySelector('#login button').click()")
        self.until("document.getElementById('state').textContent === 'live'", "the page is live")

    def check_clean(self):
        """No error in the page, and no request to another host."""
        self.value("1")
        for event in self.events:
            method, params = event["method"], event.get("params", {})
            if method == "Runtime.exceptionThrown":
                raise SystemExit(f"the page has thrown: {params}")
            if method == "Log.entryAdded" and params["entry"]["level"] == "error" and not any(status in params["entry"]["text"] for status in self.expected):
                raise SystemExit(f"the page has logged: {params}")
            if method == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith((self.base, "about:", "data:")):
                    raise SystemExit(f"the page has asked another host: {url}")

    def check_names(self):
        """A screen reader has a name for everything that can be used."""
        self.call("Accessibility.enable")
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        used = [node for node in nodes if not node.get("ignored") and node.get("role", {}).get("value") in ("button", "searchbox", "textbox", "combobox", "link", "grid", "dialog")]
        unnamed = [node for node in used if not node.get("name", {}).get("value") and node["role"]["value"] != "grid"]
        if unnamed or len(used) < 5:
            raise SystemExit(f"without a name: {unnamed}, of {len(used)}")
        print(f"{len(used)} controls have names")

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


ROW = "[...document.querySelectorAll('#rows tr.row')].find((row) => row.cells[0].textContent === %s)"


def real(browser, url, read, write):
    browser.open(url, read)
    row = ROW % "'report'"
    program = os.environ["LEASEHOLD"]
    holder = subprocess.Popen([program, "run", "report", "-c", "echo on; exec sleep 600"], stdout=subprocess.PIPE)
    waiter = None
    try:
        assert select.select([holder.stdout], [], [], LIMIT)[0] and holder.stdout.readline() == b"on\n", "the holder has the lock"
        begin = time.monotonic()
        browser.until(row, "the lock of the program is shown")
        print(f"shown after {time.monotonic() - begin:.2f} s")
        assert str(holder.pid) in browser.value(row + ".cells[2].textContent"), "the holder's process is shown"
        waiter = subprocess.Popen([program, "run", "report", "-c", "echo on; exec sleep 600"], stdout=subprocess.PIPE)
        browser.until(row + f"?.cells[4].textContent === '1'", "the waiter is counted")
        browser.value(row + ".click()")
        browser.until(f"document.querySelector('#queue tbody tr')?.cells[1]?.textContent.includes('pid {waiter.pid} ')", "the queue has the waiter")
        assert browser.value("document.querySelector('#queue tbody tr').cells[0].textContent") == "1"
        assert browser.value("document.getElementById('force').hidden"), "a read-only token can't release"
        browser.check_names()
        browser.value("document.getElementById('leave').click()")
        browser.login(write)
        browser.value("location.hash = '#/mutex/report'")
        browser.until("!document.getElementById('force').hidden", "a write token can release")
        token = browser.value("document.querySelector('#holders tbody tr').cells[2].textContent")
        browser.value("document.getElementById('force').click()")
        browser.until("document.getElementById('confirm').open", "it asks first")
        assert token in browser.value("document.getElementById('consequence').textContent")
        browser.key("Escape")
        browser.until("!document.getElementById('confirm').open")
        time_of = "document.querySelector('#holders tbody tr').cells[2].textContent"
        assert browser.value(time_of) == token, "nothing was released"
        browser.value("document.getElementById('force').click(); document.querySelector('#confirm .danger').click()")
        assert select.select([waiter.stdout], [], [], LIMIT)[0] and waiter.stdout.readline() == b"on\n", "the waiter has the lock"
        browser.until(f"document.querySelector('#holders tbody tr')?.cells[0].textContent.includes('pid {waiter.pid} ')", "the next holder is shown")
        assert browser.value(time_of) > token, "with a higher token"
        browser.until("['acquired', 'ended'].every((what) => [...document.querySelectorAll('#timeline tbody tr')].some((row) => row.cells[1].textContent === what))", "the timeline has both")
        waiter.terminate(), waiter.wait()
        browser.until("document.getElementById('about').textContent.includes('Free.')", "its release is shown")
        browser.key("Escape")
        browser.until(f"!document.getElementById('locks').hidden && !({row})", "the row is gone")
        browser.check_names()
    finally:
        for process in (holder, waiter):
            if process:
                process.kill(), process.wait()
    colours = []
    for scheme in ("light", "dark"):
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        colours.append(browser.value("getComputedStyle(document.body).backgroundColor"))
    assert len(set(colours)) == 2, colours
    browser.value("document.getElementById('theme').click()")
    assert browser.value("getComputedStyle(document.body).backgroundColor") == colours[0], "the button changes dark to light"


def many(browser, url, read):
    begin = time.monotonic()
    browser.open(url, read)
    browser.until("document.getElementById('count').textContent.startsWith('10000 locks')", "10,000 locks are counted")
    print(f"10,000 locks after {time.monotonic() - begin:.1f} s")
    drawn = browser.value("document.querySelectorAll('#rows tr').length")
    assert 10 < drawn < 120, f"{drawn} rows are in the document"
    cost = browser.value("(() => { const begin = performance.now(); arrange(); return performance.now() - begin; })()")
    print(f"{drawn} rows in the document; sorting and drawing takes {cost:.0f} ms")
    assert cost < 1000
    browser.value("document.getElementById('scroll').scrollTop = 5000 * 28")
    browser.until(ROW % "'lock-05005'", "the middle of the list is drawn")
    browser.key("/", "/")
    browser.until("document.activeElement.id === 'search'")
    browser.call("Input.insertText", text="lock-0777")
    browser.until("document.getElementById('count').textContent.startsWith('10 of 10000')", "the search finds ten")
    browser.key("ArrowDown"), browser.key("ArrowDown")
    browser.until("document.querySelector('#rows tr[aria-selected=true]')?.cells[0].textContent === 'lock-07771'", "the keyboard selects")
    browser.key("Enter", "\r")
    browser.until("document.getElementById('title').textContent === 'mutex lock-07771'", "Enter opens")
    browser.until("document.querySelectorAll('#holders tbody td').length > 1", "its holder is shown")
    browser.key("Escape")
    browser.until("!document.getElementById('locks').hidden", "Escape goes back")


def odd(browser, url, write):
    browser.open(url, write)
    browser.until("document.getElementById('count').textContent.startsWith('7 locks')", "all locks are listed")
    shown = browser.value("[...document.querySelectorAll('#rows tr.row')].map((row) => row.cells[0].textContent + ' ' + row.cells[0].title + ' ' + row.cells[2].textContent).join(' ')")
    for text in (r"pay\u{202e}lap", r"a\u{200b}b\u{feff}", r"(l\u{202e}abel\u{2066})"):
        assert text in shown, shown
    hidden = "[...document.documentElement.innerText + document.title].some((c) => /[\\u200b-\\u200f\\u202a-\\u202e\\u2060-\\u206f\\ufeff]/u.test(c))"
    browser.value(f"location.hash = '#/mutex/' + encodeURIComponent('pay\\u202elap')")
    browser.until(r"document.getElementById('title').textContent === 'mutex pay\\u{202e}lap'", "the name is escaped in the title")
    browser.until("document.querySelectorAll('#holders tbody td').length > 1", "its holder is shown")
    browser.value("document.getElementById('force').click()")
    browser.until("document.getElementById('confirm').open", "it asks first")
    assert r"pay\u{202e}lap" in browser.value("document.getElementById('consequence').textContent")
    assert not browser.value(hidden), "a hidden character is in the page"
    browser.key("Escape")
    browser.until("!document.getElementById('confirm').open")
    # What is typed into the address may be no encoding.
    for hash, title in (("#/mutex/%", "mutex %"), ("#/mutex/a/b", "mutex a/b"), ("#/mutex/.", "mutex ."), ("#/mutex/..", "mutex .."), ("#/semaphore/permits", "semaphore permits")):
        browser.value(f"location.hash = {json.dumps(hash)}")
        browser.until(f"document.getElementById('title').textContent === {json.dumps(title)}", title + " is open")
        browser.until("!document.getElementById('force').hidden", title + " can be released")
        browser.value("document.getElementById('force').click()")
        browser.until("document.getElementById('confirm').open", "it asks first")
        holders = 3 if "permits" in title else 1
        asked = browser.value("document.getElementById('consequence').textContent")
        assert asked.count(", token ") == holders, asked
        browser.value("document.querySelector('#confirm .danger').click()")
        browser.until("document.getElementById('about').textContent.includes('Free.')", title + " is free")
        browser.until(f"document.getElementById('said').textContent.startsWith('{holders} holder')", "it says how many holders were released")
    # An unknown kind is an error that stays readable, and no end of the script.
    browser.expected.append("400")
    browser.value("location.hash = '#/queue/a'")
    browser.until("document.getElementById('state').textContent.includes('no kind of lock')", "the error is shown")
    browser.value("location.hash = ''")
    browser.until("document.getElementById('state').textContent === 'live'", "the list is live again")


def shot(browser, url, read, file, hash=""):
    browser.open(url, read)
    if hash:
        browser.value(f"location.hash = {json.dumps(hash)}")
    time.sleep(float(os.environ.get("SHOT_AFTER", "3")))
    with open(file, "wb") as out:
        out.write(base64.b64decode(browser.call("Page.captureScreenshot")["data"]))


if __name__ == "__main__":
    browser = Browser()
    try:
        {"real": real, "many": many, "odd": odd, "shot": shot}[sys.argv[1]](browser, *sys.argv[2:])
        browser.check_clean()
    finally:
        browser.close()
