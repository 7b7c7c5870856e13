"""A page in headless Chromium (Debian's), driven through a pipe with Chromium's own protocol."""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from processes import stock_environment, wait_for

CHROMIUM = shutil.which("chromium")
LOG = "chromium.log"
KEYS = {"Tab": 9, "Enter": 13, "ArrowDown": 40, "ArrowRight": 39, "End": 35}


class Page:
    def __init__(self, to: int, answers):
        self._to, self._answers, self._n, self._session = to, answers, 0, None
        self.requested: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters) -> dict:
        self._n += 1
        message = {"id": self._n, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("method") == "Network.requestWillBeSent":
                self.requested.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._n:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self) -> dict:
        text = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "chromium ended"
            text += byte
        return json.loads(text)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        is_there = f"document.readyState === 'complete' && location.href === {json.dumps(url)}"
        wait_for("the page is there", lambda: self.evaluate(is_there))

    def evaluate(self, script: str):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({selector!r})?.innerText ?? ''")

    def look(self, width: int, height: int, scheme: str) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def screenshot(self, file: Path) -> None:
        image = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=False)
        file.write_bytes(base64.b64decode(image["data"]))


@contextlib.contextmanager
def open_page(folder: Path) -> Iterator[Page]:
    (commands, to), (answers, events) = os.pipe(), os.pipe()
    arguments = ["--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-background-networking",
                 "--disable-component-update", f"--user-data-dir={folder / 'chromium'}"]  # fmt: skip
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")
    # The protocol's pipes are the descriptors 3 and 4.
    shell = ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{events}', "bash", CHROMIUM, *arguments]
    with open(folder / LOG, "wb") as log:
        child = subprocess.Popen(
            shell, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=stock_environment(), start_new_session=True,
            pass_fds=(commands, events),
        )  # fmt: skip
    os.close(commands)
    os.close(events)
    try:
        with open(answers, "rb") as stream:
            yield Page(to, stream)
    finally:
        os.close(to)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
