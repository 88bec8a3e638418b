"""A headless Chromium, spoken to by DevTools' protocol over a pipe: what the tests need of it."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
KEYS = {"Tab": 9, "Enter": 13}


def program() -> str | None:
    """Chromium, if this machine has it."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Chromium:
    """One page. What it complains of is in `complaints`."""

    def __init__(self, program: str) -> None:
        self.complaints: list[str] = []
        self._loaded = False
        self._number = 0
        self._session = ""
        self._program = program

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (hears, self._to), (self._from, says) = os.pipe(), os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (hears, says)]

        def wire() -> None:  # it hears on 3 and says on 4
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [
                *(self._program, "--headless=new", "--remote-debugging-pipe", "--no-sandbox"),
                *("--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
                *("--disable-background-networking", f"--user-data-dir={self._folder.name}"),
            ],
            preexec_fn=wire,  # noqa: PLW1509 - before any thread of the test
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (hears, says, *ends):
            os.close(end)
        self._read = os.fdopen(self._from, "rb", buffering=0)
        self._rest = b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._read.close()
        os.close(self._to)
        self._folder.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What DevTools answers."""
        self._number += 1
        number = self._number
        asked = {"id": number, "method": method, "params": parameters}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == number:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']['message']}")
                return told["result"]

    def go(self, address: str) -> None:
        """Opens an address and waits until all of it is there."""
        self._loaded = False
        self.call("Page.navigate", url=address)
        self.settle()

    def settle(self) -> None:
        """Waits for the page that was asked for."""
        while not self._loaded:
            self._next()
        self._loaded = False

    def value(self, expression: str) -> Any:
        """What a line of JavaScript says of the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """A key goes down and up."""
        told = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        down = told | ({"text": "\r"} if key == "Enter" else {})
        self.call("Input.dispatchKeyEvent", type="keyDown", **down)
        self.call("Input.dispatchKeyEvent", type="keyUp", **told)

    def write(self, text: str) -> None:
        """Text goes where the cursor is."""
        self.call("Input.insertText", text=text)

    def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """The size of the window, and which colours are preferred."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """A screenshot of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = self._read.read(1 << 20)
            if not part:
                raise RuntimeError("Chromium has ended.")
            self._rest += part
        line, self._rest = self._rest.split(b"\0", 1)
        told = json.loads(line)
        match told.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown" | "Runtime.consoleAPICalled" | "Log.entryAdded":
                self.complaints.append(json.dumps(told["params"]))
        return told
