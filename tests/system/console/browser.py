"""A headless Chromium, driven by its DevTools protocol over a pair of pipes. No fixtures.

Debian's package `chromium-headless-shell` or `chromium` is enough: no driver, no WebSocket, no further package.
"""

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "google-chrome", "chrome")
WAIT_S = 60.0
TEXT_CHARS = 4000
"""Of a page that is told when a wait fails."""


def find_chromium() -> str | None:
    """Returns the path of a Chromium: of the variable CHROMIUM, else of the usual names."""
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class PageLeftError(Exception):
    """The browser left the page while a call was under way in it."""


class Browser:
    """One browser with one page. Collects what the page requested, and its errors."""

    def __init__(self, binary: str, profile: Path, *more_flags: str) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        flags += [
            f"--user-data-dir={profile}",
            "--no-first-run",
            "--disable-background-networking",
            *more_flags,
            "about:blank",
        ]
        # Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
        shell = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, binary, *flags],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session = ""
        self.requested: list[str] = []
        self.errors: list[str] = []
        [target] = [one for one in self._call("Target.getTargets")["targetInfos"] if one["type"] == "page"][:1]
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._out)
        os.close(self._in)

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def scheme(self, name: str, *, reduced_motion: bool = False) -> None:
        """Sets the system's preferences: `light` or `dark`, and whether it asks for little motion."""
        motion = "reduce" if reduced_motion else "no-preference"
        wanted = {"prefers-color-scheme": name, "prefers-reduced-motion": motion}
        self._call("Emulation.setEmulatedMedia", features=[{"name": one, "value": wanted[one]} for one in wanted])

    def js(self, expression: str) -> Any:
        """Returns the value of an expression in the page. Raises AssertionError for an exception in it."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (expression, found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, expression: str, timeout_s: float = WAIT_S) -> None:
        """Waits until an expression is true. A page that is left meanwhile is waited for as well."""
        deadline = time.monotonic() + timeout_s
        while not self._holds(expression):
            assert time.monotonic() < deadline, (expression, self.text()[:TEXT_CHARS], self.errors)
            time.sleep(0.05)

    def _holds(self, expression: str) -> bool:
        try:
            return bool(self.js(f"!!({expression})"))
        except PageLeftError:
            return False

    def text(self, selector: str = "body") -> str:
        return self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def click(self, selector: str) -> None:
        self.wait(f"document.querySelector({json.dumps(selector)})")
        self.js(f"document.querySelector({json.dumps(selector)}).click()")

    def fill(self, selector: str, text: str) -> None:
        """Replaces the value of a field, as typing does. `text`: not empty."""
        self.wait(f"document.querySelector({json.dumps(selector)})")
        # The old value is selected, not removed: a page that renders meanwhile would put it back.
        field = f"document.querySelector({json.dumps(selector)})"
        self.js(f"(() => {{ {field}.focus(); {field}.select(); }})()")
        self._call("Input.insertText", text=text)

    def key(self, name: str, text: str = "", *, shift: bool = False) -> None:
        """Presses a key, by its name (`Enter`, `Tab`, `ArrowRight`)."""
        codes = {
            "Enter": 13,
            "Tab": 9,
            "Escape": 27,
            "Home": 36,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
        }
        more: dict[str, Any] = {"windowsVirtualKeyCode": codes[name]} if name in codes else {}
        more |= {"text": text} if text else {}
        modifiers = 8 if shift else 0
        self._call("Input.dispatchKeyEvent", type="keyDown", key=name, code=name, modifiers=modifiers, **more)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=name, code=name, modifiers=modifiers)

    def hover(self, selector: str) -> None:
        place = self.js(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)}); one.scrollIntoView();"
            "const box = one.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])

    def screenshot(self, path: Path) -> None:
        import base64

        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def task_seconds(self) -> float:
        """Returns the time of all tasks of the page's main thread so far."""
        self._call("Performance.enable")
        found = self._call("Performance.getMetrics")["metrics"]
        return next(one["value"] for one in found if one["name"] == "TaskDuration")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    raise PageLeftError(method, answer["error"])
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        seen: dict[str, Callable[[], None]] = {
            "Network.requestWillBeSent": lambda: self.requested.append(params["request"]["url"]),
            "Runtime.exceptionThrown": lambda: self.errors.append(
                json.dumps(params["exceptionDetails"].get("exception", params))[:700]
            ),
            "Log.entryAdded": lambda: self._log(params["entry"]),
        }
        seen.get(event.get("method", ""), lambda: None)()

    def _log(self, entry: dict[str, Any]) -> None:
        if entry["level"] == "error" and entry["source"] != "network":
            self.errors.append(entry["text"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._in, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
