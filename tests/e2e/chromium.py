"""A headless Chromium driven over its DevTools protocol: as much of it as the tests of a page need."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
LONGEST_WAIT_S = 60.0
SOON_S = 0.05
FLAGS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
    "about:blank",
)


def program() -> str | None:
    """Return the path of this machine's Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser process; *folder* is its profile."""

    def __init__(self, path: str, folder: Path) -> None:
        sandbox = () if os.getuid() else ("--no-sandbox",)  # Chromium has none for root
        self._log = (folder.parent / "chromium.log").open("wb")
        # a BLAS that is preloaded into the tests for MLX's sake is none of a browser's business
        environment = dict(os.environ)  # noqa: TID251 - the environment of a child
        environment.pop("LD_PRELOAD", None)
        self.process = subprocess.Popen(
            [path, *sandbox, f"--user-data-dir={folder}", *FLAGS],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        port_file = folder / "DevToolsActivePort"
        end = time.monotonic() + LONGEST_WAIT_S
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert self.process.poll() is None, Path(self._log.name).read_text(errors="replace")
            assert time.monotonic() < end, "Chromium opens no port"
            time.sleep(SOON_S)
        self.address = f"http://127.0.0.1:{port_file.read_text().split()[0]}"

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait(LONGEST_WAIT_S)
        self._log.close()


class Page:
    """One tab. Use it in a `with` block."""

    def __init__(self, browser: Chromium, width: int = 1440, height: int = 1000) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._runner = asyncio.Runner()
        self._calls = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._address = browser.address
        self._size = (width, height)

    def __enter__(self) -> Self:
        self._runner.run(self._open())
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        width, height = self._size
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 640,
        )  # fmt: skip
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ConnectionError):
            self._runner.run(self._close())
        self._runner.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        return self._runner.run(self._call(method, parameters))

    def evaluate(self, expression: str) -> Any:
        """Return what *expression* is in the page."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str, what: str, accept: Callable[[Any], Any] = bool) -> Any:
        """Return what *expression* is in the page as soon as that is accepted."""
        end = time.monotonic() + LONGEST_WAIT_S
        while True:
            found = self.evaluate(expression)
            if accept(found):
                return found
            assert time.monotonic() < end, f"waited in vain: {what}; last: {found!r}"
            time.sleep(SOON_S)

    def press(self, key: str, text: str = "") -> None:
        """Press and release a key, such as ``Tab`` or ``/``."""
        code = {"Tab": 9, "Enter": 13}.get(key, 0)
        described = {"key": key, "code": key, "windowsVirtualKeyCode": code, "text": text}
        self.call("Input.dispatchKeyEvent", type="keyDown", **described)
        self.call("Input.dispatchKeyEvent", type="keyUp", **described)

    async def _open(self) -> None:
        self._session = aiohttp.ClientSession()
        async with self._session.put(f"{self._address}/json/new?about:blank") as answer:
            target = await answer.json()
        self._socket = await self._session.ws_connect(
            target["webSocketDebuggerUrl"], max_msg_size=0
        )
        self._target = target["id"]

    async def _close(self) -> None:
        await self._call("Target.closeTarget", {"targetId": self._target})
        await self._socket.close()
        await self._session.close()

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._calls += 1
        number = self._calls
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(LONGEST_WAIT_S):
            while number not in self._answers:
                self._take(await self._socket.receive_json())
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    def _take(self, message: dict[str, Any]) -> None:
        match message:
            case {"id": number}:
                self._answers[number] = message
            case {"method": "Network.requestWillBeSent", "params": {"request": request}}:
                self.requests.append(request["url"])
            case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                self.complaints.append(json.dumps(details))
            case {"method": "Log.entryAdded", "params": {"entry": entry}}:
                self.complaints.append(f"{entry['source']}: {entry['text']}")
            case {"method": "Page.javascriptDialogOpening", "params": {"message": said}}:
                self.complaints.append(f"dialog: {said}")
