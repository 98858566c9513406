"""JSON over HTTP to an engine's server: calls, with retries, and streams."""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import urlsplit

KEY_VARIABLE = "MEDUSA_K25_API_KEY"
LATER = (408, 425, 429)  # statuses below 500 that say nothing about the request itself


class Refused(Exception):
    """The server answered that it will not take a request. `status`: its HTTP status."""

    def __init__(self, status: int, text: str):
        super().__init__(f"{status} {text}")
        self.status = status


@dataclass(frozen=True)
class Server:
    """url: such as http://127.0.0.1:30000. retries: of a call that did not get through or found the server failing.
    timeout_s: how long a call may stand still; what took longer would do so again, so it is not tried again.

    A server with a key gets it from the environment variable MEDUSA_K25_API_KEY; no message ever contains it.
    """

    url: str
    retries: int = 5
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.username is not None or parts.password is not None or parts.query:
            raise ValueError(f"server=: an address without a password or key; put a key into {KEY_VARIABLE}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"server={self.url}: expected an address such as http://127.0.0.1:30000")

    def call(self, path: str, content: dict[str, Any] | None = None) -> Any:
        """The JSON that the server answers with; `content` makes it a POST.

        Refused when it says that the request is at fault, OSError when it is gone or keeps failing, TimeoutError, which
        is one, when it takes too long.
        """
        request = self._request(path, content)
        kind: type[OSError] = OSError
        for attempt in range(self.retries + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                cause = _said(error)
            except TimeoutError:
                kind, cause = TimeoutError, f"nothing came for {self.timeout_s:g} s"
                break
            # URLError is an OSError; what is not JSON is a ValueError; half an answer is an HTTPException
            except (OSError, ValueError, http.client.HTTPException) as error:
                cause = str(error) or type(error).__name__
            if attempt < self.retries:
                time.sleep(min(0.2 * 2**attempt, 10))
        self._gone(path, kind, cause)

    def stream(self, path: str, content: dict[str, Any]) -> Iterator[bytes]:
        """The JSON texts of a stream of server-sent events, as they come, up to its end "[DONE]". Tried once.

        Refused and OSError as `call` raises them, OSError also for a stream that ends before its end.
        """
        kind: type[OSError] = OSError
        try:
            with urllib.request.urlopen(self._request(path, content), timeout=self.timeout_s) as answer:
                for line in answer:
                    if line.startswith(b"data: "):
                        if line.startswith(b"data: [DONE]"):
                            return
                        yield line.removeprefix(b"data: ")
            cause = "the stream ended too early"
        except urllib.error.HTTPError as error:
            cause = _said(error)
        except TimeoutError:
            kind, cause = TimeoutError, f"nothing came for {self.timeout_s:g} s"
        except (OSError, http.client.HTTPException) as error:
            cause = str(error) or type(error).__name__
        self._gone(path, kind, cause)

    def _request(self, path: str, content: dict[str, Any] | None) -> urllib.request.Request:
        request = urllib.request.Request(self.url.rstrip("/") + path)
        if content is not None:
            request.data = json.dumps(content).encode()
            request.add_header("Content-Type", "application/json")
        if key := os.environ.get(KEY_VARIABLE):
            request.add_unredirected_header("Authorization", f"Bearer {key}")  # for this server alone
        return request

    def _gone(self, path: str, kind: type[OSError], cause: str) -> NoReturn:
        raise kind(f"no answer from {self.url}{path}: {cause}; when it is there, run the same command again")


def _said(error: urllib.error.HTTPError) -> str:
    """What is wrong with the server; Refused where it says that the request is at fault."""
    text = error.read(1000).decode(errors="replace")
    if key := os.environ.get(KEY_VARIABLE):
        text = text.replace(key, "***")
    if error.code < 500 and error.code not in LATER:
        raise Refused(error.code, text) from None
    return f"{error.code} {text}"
