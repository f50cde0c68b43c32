"""Debian's Chromium without a window, to open pages and click: its protocol over two pipes."""

import base64
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import time

CHROMIUM = shutil.which("chromium")


class Page:
    """A page of a file; a context that ends the browser that it starts."""

    def __init__(self, path, width=1400, height=1400):
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
        # Pipes of the protocol are descriptors 3 and 4; `sh` may know no descriptor above 9.
        words = [
            "bash", "-c", f'exec "$@" 3<&{commands} 4>&{answers}', "bash",
            CHROMIUM, *flags.split(),
            "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}",
            f"--window-size={width},{height}", "about:blank",
        ]  # fmt: skip
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._browser = subprocess.Popen(words, pass_fds=(commands, answers), **quiet)
        os.close(commands)
        os.close(answers)
        self._rest, self._count, self._session = b"", 0, None
        self.errors, self.requests = [], []
        (target,) = [t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = {"targetId": target["targetId"], "flatten": True}
        self._session = self("Target.attachToTarget", **attached)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        began = time.monotonic()
        self("Page.navigate", url=pathlib.Path(path).resolve().as_uri())
        self.wait("document.readyState === 'complete' && window.Bokeh?.documents.length > 0")
        self.wait("Bokeh.documents[0].is_idle")
        self.seconds = time.monotonic() - began

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._browser.terminate()
        self._browser.wait(20)
        os.close(self._commands)
        os.close(self._answers)
        self._profile.cleanup()

    def __call__(self, method, **params):
        """Returns the browser's answer to a command of the protocol."""
        self._count += 1
        command = {"id": self._count, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            said = self._read()
            if said.get("id") == self._count:
                assert "error" not in said, (method, said)
                return said["result"]
            self._note(said)

    def _read(self, seconds=60):
        while b"\0" not in self._rest:
            ready, *_ = select.select([self._answers], [], [], seconds)
            assert ready, "the browser does not answer"
            more = os.read(self._answers, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, said):
        """Keeps what the console and the network say."""
        kind, params = said.get("method"), said.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"])
        elif kind == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"])
        elif kind == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(params["args"])
        elif kind == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def eval(self, script):
        """Returns the value of an expression in the page."""
        said = self("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def wait(self, script, seconds=60):
        """Returns once an expression is true."""
        until = time.monotonic() + seconds
        while not self.eval(script):
            assert time.monotonic() < until, script
            time.sleep(0.02)

    def point(self, name, x=None, y=None):
        """Returns where the middle of a widget is, or a point of a figure's axes."""
        at = "[box.x + box.width / 2, box.y + box.height / 2]"
        if x is not None:
            scales = f"frame.x_scale.compute({x}), box.y + frame.y_scale.compute({y})"
            at = f"[box.x + {scales}]"
        return self.eval(
            f"(() => {{const model = Bokeh.documents[0].get_model_by_name('{name}')\n"
            "const {el, frame} = Bokeh.index.find_one(model)\n"
            f"const box = el.getBoundingClientRect(); return {at}}})()"
        )

    def property(self, name, path):
        """Returns a property of a model, such as `x_range.start`."""
        return self.eval(f"Bokeh.documents[0].get_model_by_name('{name}').{path}")

    def mouse(self, kind, x, y, **options):
        """Sends an event of the mouse: mouseMoved, mousePressed, mouseReleased, mouseWheel."""
        self("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)

    def click(self, x, y):
        """Clicks there."""
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def type(self, text):
        """Types into what has the focus."""
        self("Input.insertText", text=text)

    def press_enter(self):
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        for kind in ("keyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, text="\r", **key)

    def screenshot(self, path):
        """Writes what one sees as a PNG."""
        data = self("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        pathlib.Path(path).write_bytes(base64.b64decode(data))


if __name__ == "__main__":  # python -m tests.chromium PAGE
    with Page(sys.argv[1]) as opened:
        size = pathlib.Path(sys.argv[1]).stat().st_size
        print(f"{sys.argv[1]}: {size / 1e6:.1f} MB, open after {opened.seconds:.2f} s")
