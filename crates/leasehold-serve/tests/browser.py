#!/usr/bin/env python3
"""Drives the dashboard in a headless Chromium, through its debugging pipe.

    browser.py real URL READ_TOKEN WRITE_TOKEN   a lock of a real program (LEASEHOLD names it): seen, queued, released by force
    browser.py many URL READ_TOKEN               10,000 locks: list, search, keyboard
    browser.py odd URL WRITE_TOKEN               names of hidden characters, `.`, `..` and `%`; long names; forced releases
    browser.py chosen URL WRITE_TOKEN TOKEN      the holder of the semaphore `permits` with this token is released, and no other
    browser.py empty URL WRITE_TOKEN STORE       no lock, and then one; which store and which server
    browser.py charts URL READ_TOKEN WAITERS     axes, and values on hover and by keyboard
    browser.py stale URL READ_TOKEN              a connection that is silent, and one that is cut
    browser.py outage URL READ_TOKEN             prints `ready`, waits for a line, and expects that the store has stopped
    browser.py widths URL READ_TOKEN             telephone, tablet and desk
    browser.py shot URL READ_TOKEN FILE [WIDTH HEIGHT SCHEME HASH]   a screenshot

Prints what it saw. Ends with an error if something is missing after a bounded wait.
"""
import base64, json, os, select, shutil, socket, subprocess, sys, tempfile, threading, time

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

    def text(self, id):
        return self.value(f"document.getElementById({json.dumps(id)}).textContent")

    def shown(self, id):
        """Whether it takes a place on the screen."""
        return self.value(f"document.getElementById({json.dumps(id)}).getClientRects().length > 0")

    def size(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)

    def media(self, feature, value):
        self.call("Emulation.setEmulatedMedia", features=[{"name": feature, "value": value}])

    def key(self, name, text=None):
        code = {"Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "/": 191, "Tab": 9, "ArrowLeft": 37, "Home": 36, "End": 35}.get(name, 0)
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
        used = [node for node in nodes if not node.get("ignored") and node.get("role", {}).get("value") in ("button", "searchbox", "textbox", "combobox", "link", "grid", "dialog", "slider")]
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


FORCE = "document.querySelector('#holders button')"
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
        assert not browser.value(FORCE), "a read-only token can't release"
        browser.check_names()
        browser.value("document.getElementById('leave').click()")
        browser.login(write)
        browser.value("location.hash = '#/mutex/report'")
        browser.until(FORCE, "a write token can release")
        token_shown = "document.querySelector('#holders tbody td[data-key=token]').textContent"
        token = browser.value(token_shown)
        browser.value(FORCE + ".click()")
        browser.until("document.getElementById('confirm').open", "it asks first")
        assert token in browser.value("document.getElementById('consequence').textContent")
        browser.key("Escape")
        browser.until("!document.getElementById('confirm').open")
        assert browser.value(token_shown) == token, "nothing was released"
        browser.value(FORCE + ".click(); document.querySelector('#confirm .danger').click()")
        assert select.select([waiter.stdout], [], [], LIMIT)[0] and waiter.stdout.readline() == b"on\n", "the waiter has the lock"
        browser.until(f"document.querySelector('#holders tbody tr')?.cells[0].textContent.includes('pid {waiter.pid} ')", "the next holder is shown")
        assert browser.value(token_shown) > token, "with a higher token"
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
        browser.media("prefers-color-scheme", scheme)
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
    browser.value("document.getElementById('scroll').scrollTop = 5000 * rowHeight()")
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


# What is not seen, or looks like something else; and the same as it is shown.
DECEIVING = {
    "pay\u202elap": r"pay\u{202e}lap",
    "a\u200bb\ufeff": r"a\u{200b}b\u{feff}",
    "\u2066a\u2069": r"\u{2066}a\u{2069}",
    "p\u0430yments": r"p\u{430}yments",
    "\u0441\u043e\u0440\u0443": r"\u{441}\u{43e}\u{440}\u{443}",
    "\uff50ay": r"\u{ff50}ay",
    "cafe\u0301": r"cafe\u{301}",
    "order 7 ": r"order 7\u{20}",
    "a\u00a0b": r"a\u{a0}b",
    r"pay\u{202e}lap": r"pay\u{5c}u{202e}lap",
}
HONEST = ["\u0437\u0430\u043a\u0430\u0437:42", "\u8ba2\u5355-a:42", "caf\u00e9", "order 7", "a/b", "%", ".", ".."]


def open_lock(browser, kind, name):
    browser.value(f"location.hash = '#/{kind}/' + encodeURIComponent({json.dumps(name)})")
    browser.until("document.querySelectorAll('#holders tbody td').length > 1", f"the holders of {name!r} are shown")


def odd(browser, url, write):
    browser.open(url, write)
    browser.until(f"rows.size === {len(DECEIVING) + len(HONEST) + 1}", "all locks are listed")
    browser.until(f"document.querySelectorAll('#rows tr.row').length === rows.size", "all locks are drawn")
    names = {text: (is_odd, title) for text, is_odd, title in browser.value("[...document.querySelectorAll('#rows td[data-key=name] .name')].map((name) => [name.textContent, name.classList.contains('odd'), name.title])")}
    for text in DECEIVING.values():
        assert names[text][0] and text in names[text][1], f"{text} has no mark"
    for text in HONEST:
        assert names[text] == (False, text), f"{text} is no name that deceives: {names[text]}"
    assert r"(l\u{202e}abel\u{2066})" in browser.text("rows"), "the label of a holder is escaped"
    long = "[...document.querySelectorAll('#rows .name')].find((name) => name.textContent.startsWith('tenant-'))"
    assert browser.value(f"{long}.querySelector('.head').scrollWidth > {long}.querySelector('.head').clientWidth"), "a long name is cut"
    assert browser.value(f"{long}.querySelector('.tail').textContent") == "batch:shard-07", "its end is shown"
    assert browser.value(long + ".title") == browser.value(long + ".textContent"), "the whole name is shown on hover"
    hidden = "[...document.documentElement.innerText + document.title].some((c) => /[\\u200b-\\u200f\\u202a-\\u202e\\u2060-\\u206f\\ufeff]/u.test(c))"
    open_lock(browser, "mutex", "pay\u202elap")
    assert browser.text("title") == r"mutex pay\u{202e}lap", "the name is escaped in the title"
    browser.value(FORCE + ".click()")
    browser.until("document.getElementById('confirm').open", "it asks first")
    assert r"pay\u{202e}lap" in browser.text("consequence")
    assert not browser.value(hidden), "a hidden character is in the page"
    browser.key("Escape")
    browser.until("!document.getElementById('confirm').open")
    # What is typed into the address may be no encoding.
    for hash, title in (("#/mutex/%", "mutex %"), ("#/mutex/a/b", "mutex a/b"), ("#/mutex/.", "mutex ."), ("#/mutex/..", "mutex ..")):
        browser.value(f"location.hash = {json.dumps(hash)}")
        browser.until(f"document.getElementById('title').textContent === {json.dumps(title)}", title + " is open")
        browser.until(FORCE, title + " can be released")
        token = browser.value("document.querySelector('#holders td[data-key=token]').textContent")
        browser.value(FORCE + ".click()")
        browser.until("document.getElementById('confirm').open", "it asks first")
        browser.value("document.querySelector('#confirm .danger').click()")
        browser.until("document.getElementById('about').textContent.includes('Free.')", title + " is free")
        browser.until(f"document.getElementById('result').textContent === 'The holder with the token {token} was released by force.'", "it says what was released")
    # An unknown kind is an error that stays readable, and no end of the script.
    browser.expected.append("400")
    browser.value("location.hash = '#/queue/a'")
    browser.until("document.getElementById('state').textContent.includes('no kind of lock')", "the error is shown")
    browser.value("location.hash = ''")
    browser.until("document.getElementById('state').textContent === 'live'", "the list is live again")


def chosen(browser, url, write, token):
    browser.open(url, write)
    open_lock(browser, "semaphore", "permits")
    shown = "[...document.querySelectorAll('#holders td[data-key=token]')].map((cell) => cell.textContent)"
    tokens = browser.value(shown)
    assert len(tokens) == 3 and token in tokens, tokens
    button = f"[...document.querySelectorAll('#holders tr')].find((row) => row.querySelector('[data-key=token]')?.textContent === '{token}').querySelector('button')"
    browser.value(f"window.button = {button}; window.before = state; 0")
    browser.until("state !== window.before", "an update comes")
    assert browser.value("document.contains(window.button)"), "an update keeps the button under the pointer"
    browser.value("window.button.click()")
    browser.until("document.getElementById('confirm').open", "it asks first")
    asked = browser.text("consequence")
    assert "semaphore permits" in asked and f" pid {os.getppid()} " in asked, asked
    assert [one for one in tokens if one in asked] == [token], asked
    browser.value("document.querySelector('#confirm .danger').click()")
    browser.until(f"!{shown}.includes('{token}')", "the holder is gone")
    assert browser.value(shown) == [one for one in tokens if one != token], "the others are still there"
    browser.until(f"document.getElementById('result').textContent.includes('{token} was released')", "it says what was released")


def empty(browser, url, write, store):
    browser.open(url, write)
    browser.until("!document.getElementById('empty').hidden && hasList", "words in place of the list")
    assert browser.text("nothing") == "No lock is in use" and browser.shown("try")
    assert store in browser.text("hint"), "the words name the store"
    assert browser.text("store") == store, "the store is shown"
    server = browser.text("server")
    assert socket.gethostname() in server and url in server and "version " in server and "up " in server, server
    browser.value("ask('/v1/locks/mutex/first/acquire', { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: '{\"ttl_ms\": 600000}' }).then((answer) => answer.status)")
    browser.until(ROW % "'first'", "the lock is shown")
    assert not browser.shown("empty"), "the words are gone"
    browser.key("/", "/")
    browser.call("Input.insertText", text="second")
    browser.until("document.getElementById('nothing').textContent === 'No lock matches.'", "the search finds nothing, which is something else")
    assert not browser.shown("try") and "1 lock is in use" in browser.text("hint")
    browser.value("document.getElementById('reset').click()")
    browser.until(ROW % "'first'", "all locks are shown again")


def charts(browser, url, read, waiters):
    browser.open(url, read)
    point = "charts[0].data.at(-1)"
    browser.until(f"charts[0].data.length > 5 && {point}.value === {waiters}", "the waiters are in the history")
    for key, units in (("waiting", "number"), ("grants_per_second", "/s"), ("p99_wait_ms", " s"), ("lost", "per 10 s")):
        figure = f"document.getElementById('chart-{key}')"
        assert units in browser.value(figure + ".parentElement.textContent"), f"{key} has a unit"
        labels = browser.value(f"[...{figure}.querySelectorAll('text')].map((text) => text.textContent)")
        assert "0" in labels and any(label.startswith("-") for label in labels) and len(labels) >= 4, labels
    browser.until(f"document.getElementById('at-waiting').textContent === 'now' && document.getElementById('now-waiting').textContent === '{waiters}'", "the last value is shown")
    # The pointer is where the last point is; the chart moves on below it.
    where = browser.value("(() => { const { left, top, width } = document.getElementById('chart-waiting').getBoundingClientRect(); return [left + width - 8, top + 30]; })()")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=where[0], y=where[1])
    assert browser.value("charts[0].pinned !== null && document.querySelector('#chart-waiting .cross') !== null"), "the pointer marks a point"
    value, at = browser.value("(() => { const point = charts[0].data.find((p) => p.at === charts[0].pinned); return [String(point.value), time(point.at)]; })()")
    assert (browser.text("now-waiting"), browser.text("at-waiting")) == (value, at), "its value and its time are shown"
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    browser.until("document.getElementById('at-waiting').textContent === 'now'", "without the pointer it is the last value")
    for _ in range(20):
        browser.key("Tab")
        if browser.value("document.activeElement.id") == "chart-waiting":
            break
    assert browser.value("document.activeElement.id") == "chart-waiting", "the keyboard reaches the chart"
    said = "document.activeElement.getAttribute('aria-valuetext')"
    browser.key("Home")
    first = browser.value("[String(charts[0].data[0].value), time(charts[0].data[0].at)].join(', ')")
    assert browser.value(said) == first and browser.text("at-waiting") in first, browser.value(said)
    browser.key("End"), browser.key("ArrowLeft")
    assert browser.value("charts[0].pinned < charts[0].data.at(-1).at && charts[0].pinned > charts[0].data[0].at"), browser.value(said)
    browser.check_names()
    browser.value("document.activeElement.blur()")
    # With reduced motion a second look draws nothing.
    still = "(() => { drawnAt = 0; draw(); const drawn = charts[0].svg.firstChild; draw(); return charts[0].svg.firstChild === drawn; })()"
    assert not browser.value(still)
    browser.media("prefers-reduced-motion", "reduce")
    assert browser.value(still), "the charts do not move"


class Relay:
    """Passes connections on to the server, until it is told to be silent or to cut them."""

    def __init__(self, url):
        host, port = url.removeprefix("http://").split(":")
        self.target, self.moving, self.open, self.is_cut = (host, int(port)), threading.Event(), [], False
        self.moving.set()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            near = self.listener.accept()[0]
            if self.is_cut:
                near.close()
                continue
            far = socket.create_connection(self.target)
            self.open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self.copy, args=(source, sink), daemon=True).start()

    def copy(self, source, sink):
        try:
            while data := source.recv(1 << 16):
                self.moving.wait()
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def cut(self):
        self.is_cut = True
        for end in self.open:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


DIMMED = "Number(getComputedStyle(document.getElementById('rows')).opacity) < 0.8"


def expect_stale(browser, why):
    browser.until(f"document.getElementById('why').textContent.includes({json.dumps(why)})", why)
    assert browser.shown("stale") and browser.value(DIMMED), "the rows are dimmed"
    at = browser.value("time(listedAt)")
    assert browser.text("why").endswith("The rows are as of " + at) and browser.text("since").endswith(" s ago)"), browser.text("stale")
    assert browser.text("at-waiting") == browser.value("time(clock())"), "the charts do not say that it is now"
    held = "document.querySelector('#rows td[data-key=since_ms]').textContent"
    before, looked = browser.value(held), browser.value("Date.now()")
    browser.until(f"Date.now() > {looked} + 2500", "time passes")
    if browser.shown("stale"):
        assert browser.value(held) == before, "what is not known does not go on"


def expect_live(browser):
    browser.until(f"document.getElementById('state').textContent === 'live' && document.getElementById('stale').hidden && !({DIMMED})", "it is live, and nothing is dimmed")


def stale(browser, url, read):
    relay = Relay(url)
    browser.open(relay.url, read)
    browser.expected.append("ERR_")
    browser.until("document.querySelectorAll('#rows tr.row').length > 0", "there is a row")
    expect_live(browser)
    relay.moving.clear()
    expect_stale(browser, "The server sends nothing.")
    assert browser.text("state") == "late"
    relay.moving.set()
    expect_live(browser)
    relay.cut()
    expect_stale(browser, "The connection to the server is lost; retrying.")
    assert browser.text("state") == "connection lost"
    browser.value("location.hash = '#/mutex/kept'")
    browser.until("!document.getElementById('lock').hidden", "the page of the lock is open")
    assert browser.shown("stale"), "it is stale, too"
    browser.value("location.hash = ''")
    relay.is_cut = False
    expect_live(browser)


def outage(browser, url, read):
    browser.open(url, read)
    browser.until("document.querySelectorAll('#rows tr.row').length > 0", "there is a row")
    expect_live(browser)
    print("ready", flush=True)
    sys.stdin.readline()
    expect_stale(browser, "The store does not answer: ")
    assert browser.text("state") == "store unavailable"


def widths(browser, url, read):
    browser.open(url, read)
    browser.until("document.querySelectorAll('#rows tr.row').length > 1", "there are rows")
    for width in (390, 800, 1400):
        browser.size(width, 844)
        browser.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        for hash in ("", "#/mutex/kept"):
            browser.value(f"location.hash = {json.dumps(hash)}")
            browser.until("document.querySelectorAll('#holders td').length > 1" if hash else "document.querySelectorAll('#rows tr.row').length > 1", "the page is drawn")
            overflow = browser.value("document.documentElement.scrollWidth")
            assert overflow <= width, f"{hash} at {width}: {overflow}"
        browser.value("location.hash = ''")
        browser.until("document.querySelectorAll('#rows tr.row').length > 1 && document.getElementById('lock').hidden", "the list is drawn")
        assert browser.value("$('scroll').scrollWidth <= $('scroll').clientWidth"), f"the list is wider than {width}"
        cells = browser.value("[...document.querySelector('#rows tr.row').cells].map((cell) => { const { left, right, top, bottom } = cell.getBoundingClientRect(); return { key: cell.dataset.key, left, right, top, bottom, whole: cell.scrollWidth <= cell.clientWidth }; })")
        token = next(cell for cell in cells if cell["key"] == "token")
        assert token["whole"], f"the token is cut at {width}"
        assert all((cell["bottom"], cell["right"]) <= (token["bottom"], token["right"]) for cell in cells), f"the token is not last at {width}: {cells}"
        row = browser.value("document.querySelector('#rows tr.row').getBoundingClientRect().height")
        assert abs(row - browser.value("rowHeight()")) < 1.5, f"a row at {width} is {row} high"
        is_card = max(cell["top"] for cell in cells) >= min(cell["bottom"] for cell in cells)
        assert is_card == (width < 1000), f"a card at {width}: {is_card}"
    browser.check_names()


def shot(browser, url, read, file, width="1400", height="900", scheme="light", hash=""):
    browser.size(int(width), int(height))
    browser.media("prefers-color-scheme", scheme)
    browser.open(url, read)
    if hash:
        browser.value(f"location.hash = {json.dumps(hash)}")
    time.sleep(float(os.environ.get("SHOT_AFTER", "3")))
    with open(file, "wb") as out:
        out.write(base64.b64decode(browser.call("Page.captureScreenshot")["data"]))


if __name__ == "__main__":
    browser = Browser()
    try:
        {name: globals()[name] for name in ("real", "many", "odd", "chosen", "empty", "charts", "stale", "outage", "widths", "shot")}[sys.argv[1]](browser, *sys.argv[2:])
        browser.check_clean()
    finally:
        browser.close()
