# SPDX-License-Identifier: Apache-2.0
"""One request to the frontend, and how long its first token took."""

import http.client
import json
import time
from dataclasses import dataclass

from .errors import GraphError

TIMEOUT_S = 120


class RequestFailed(GraphError):
    """The graph answered with an error, or not in time. `status` is HTTP's, 0 without an answer."""

    def __init__(self, status: int, text: str):
        super().__init__(f"request failed with status {status}: {text[:500]}" if status else f"no answer: {text[:500]}")
        self.status = status


@dataclass(frozen=True)
class Answer:
    """`ttft_s`: until the first token; `total_s`: until the last."""

    text: str
    prompt_tokens: int
    ttft_s: float
    total_s: float
    finish_reason: str


def get(port: int, path: str, timeout_s: float = 10) -> str:
    """The body of a page of 127.0.0.1. Raises OSError, or RequestFailed where the status is not 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise OSError(f"{path}: {error!r}") from error
    finally:
        connection.close()
    if answer.status != 200:
        raise RequestFailed(answer.status, body)
    return body


def body_of(model: str, prompt: str | list[int], max_tokens: int) -> dict:
    """A greedy completion of a text, or of tokens."""
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}


def ask(port: int, model: str, prompt: str | list[int], max_tokens: int = 16, timeout_s: float = TIMEOUT_S) -> Answer:
    """Streams a completion. Raises RequestFailed, also where the stream ends early or takes longer than `timeout_s` in all."""
    body = body_of(model, prompt, max_tokens) | {"stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    began = time.monotonic()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RequestFailed(answer.status, answer.read().decode(errors="replace"))
        return _stream(answer, began, began + timeout_s)
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        raise RequestFailed(0, repr(error)) from error
    finally:
        connection.close()


def _stream(answer: http.client.HTTPResponse, began: float, deadline: float) -> Answer:
    text, finish, usage, first = "", None, None, None
    for line in answer:
        if time.monotonic() > deadline:
            raise RequestFailed(0, f"unfinished after {deadline - began:.0f} s")
        if not line.startswith(b"data: "):
            if line.startswith((b"event: error", b": ")):
                text_of_error = line.decode(errors="replace")
                if line.startswith(b"event: error"):
                    raise RequestFailed(0, text_of_error + answer.read(2000).decode(errors="replace"))
            continue
        if line.strip() == b"data: [DONE]":
            break
        said = json.loads(line[6:])
        if "error" in said:
            raise RequestFailed(0, json.dumps(said["error"]))
        usage = said.get("usage") or usage
        for choice in said.get("choices") or ():
            if choice.get("text"):
                first = first or time.monotonic()
                text += choice["text"]
            finish = choice.get("finish_reason") or finish
    if finish is None or usage is None or finish == "error":
        raise RequestFailed(0, f"the stream ended with {finish!r} after {text!r}")
    ended = time.monotonic()
    return Answer(text, usage["prompt_tokens"], (first or ended) - began, ended - began, finish)
