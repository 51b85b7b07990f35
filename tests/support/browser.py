"""A page in a real browser: Chromium, driven by its DevTools protocol. Not a test module."""

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from waiting import PATIENCE_SECONDS

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--remote-debugging-port=0",
)  # fmt: skip


class Browser:
    """One browser with one page. Its methods are called from one thread."""

    def __init__(self, width: int = 1360, height: int = 1000) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="splitserve-browser-", ignore_cleanup_errors=True)
        command = [PROGRAM, *_OPTIONS, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._loop = asyncio.new_event_loop()
        self._numbers = itertools.count(1)
        self.messages: list[str] = []  # errors and warnings of the page
        self._loop.run_until_complete(self._connect())
        for name in ("Page", "Runtime", "Log", "Accessibility"):
            self.call(f"{name}.enable")
        self.resize(width, height)

    async def _connect(self) -> None:
        port_file = Path(self._folder.name) / "DevToolsActivePort"
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not port_file.is_file() or "\n" not in port_file.read_text():
            assert self._process.poll() is None and time.monotonic() < deadline, "the browser doesn't start"
            await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        self._session = aiohttp.ClientSession()
        while True:
            async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [each for each in await answer.json() if each["type"] == "page"]
            if pages:
                break
            assert time.monotonic() < deadline, "the browser opens no page"
        self._socket = await self._session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol."""
        return self._loop.run_until_complete(self._call(method, parameters))

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                message = json.loads(await self._socket.receive_str())
                if message.get("id") == number:
                    assert "error" not in message, f"{method}: {message['error']}"
                    result: dict[str, Any] = message["result"]
                    return result
                self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.messages.append(str(parameters["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.messages.append(parameters["entry"]["text"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until a JavaScript expression is true, and return its value."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := self.run(expression)):
            assert time.monotonic() < deadline, f"waited in vain for {expression}; the page says: {self.text()[:500]}"
            time.sleep(0.05)
        return found

    def text(self, selector: str = "body") -> str:
        found: str = self.run(f"document.querySelector({json.dumps(selector)})?.innerText || ''")
        return found

    def press(self, key: str, text: str = "") -> None:
        """Press a key; ``text``: what it types."""
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=_CODES.get(key, 0),
                **typed,
            )

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )

    def prefer(self, scheme: str) -> None:
        """Prefer a color scheme: light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def names_by_role(self) -> dict[str, list[str]]:
        """Return the names that a screen reader says, by role."""
        found: dict[str, list[str]] = {}
        for node in self.call("Accessibility.getFullAXTree")["nodes"]:
            if not node.get("ignored"):
                name = node.get("name", {}).get("value", "")
                found.setdefault(node["role"]["value"], []).append(str(name))
        return found

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        async def end() -> None:
            await self._socket.close()
            await self._session.close()

        self._loop.run_until_complete(end())
        self._loop.close()
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()


_CODES = {"Tab": 9, "Enter": 13, " ": 32}
