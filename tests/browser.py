"""A headless Chromium for tests, spoken to over a pipe in the DevTools protocol: no package is needed, only the
browser.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def executable():
    """The browser's path, or None: $CHROMIUM, or what is installed under a usual name. Not on Windows, whose pipes are
    others.
    """
    if os.name != "posix":
        return None
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """``with Browser() as browser: browser.open(path); browser("document.title")``."""

    def __init__(self, width=1280, height=900, dark=False):
        self.size, self.dark = (width, height), dark

    def __enter__(self):
        import fcntl

        self.profile = tempfile.mkdtemp(prefix="remanence-browser-")
        inside, self.writer = os.pipe()
        self.reader, outside = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (inside, outside)]

        def place():
            """The browser reads its orders from descriptor 3 and answers on 4."""
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--remote-debugging-pipe",
        ]
        command = [executable(), *flags, f"--user-data-dir={self.profile}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, preexec_fn=place, close_fds=False, **quiet)
        for end in (inside, outside, *ends):
            os.close(end)
        self.count, self.rest, self.errors, self.session = 0, b"", [], None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.send(f"{domain}.enable")
        width, height = self.size
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self.dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.requests = []
        return self

    def __exit__(self, *_):
        os.close(self.writer)
        os.close(self.reader)
        self.process.terminate()
        self.process.wait(timeout=20)
        shutil.rmtree(self.profile, ignore_errors=True)

    def _next(self):
        while b"\0" not in self.rest:
            came = os.read(self.reader, 1 << 16)
            if not came:
                raise RuntimeError("the browser has ended")
            self.rest += came
        line, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(line)
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(message["params"]["exceptionDetails"])
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        return message

    def send(self, method, **parameters):
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        os.write(
            self.writer,
            json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0",
        )
        while True:
            answer = self._next()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, path):
        self.send("Page.navigate", url=path.resolve().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass
        self.settle()

    def __call__(self, expression):
        """The value of a JavaScript expression, awaited."""
        told = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def click(self, selector):
        """A real click in the middle of an element."""
        self(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        self.settle()
        box = self(f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getClientRects()[0];"
                   " return [b.left + b.width / 2, b.top + b.height / 2]; })()")  # fmt: skip
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)
        self.settle()

    def settle(self):
        """Two frames: what was asked for is drawn."""
        self(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50))))"
        )

    def picture(self, path):
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))
