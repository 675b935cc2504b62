# SPDX-License-Identifier: Apache-2.0
"""Calls and answers as lines of JSON, with bytes in it as {"bytes": hexadecimal digits}.

A call is [name, arguments, named arguments]; its answer {"is": what it gave}, or {"raised": kind of the error, "text": all of it}. The
side that calls is `peer_process.PeerProcess`, or `rack.Peer` for a host of the lab.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

_answers = None


class Raised(AssertionError):
    """A call raised an error in the other process; `kind` is its name."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def line(message: Any) -> bytes:
    """A message as it travels."""
    return json.dumps(message, default=lambda value: {"bytes": bytes(value).hex()}).encode() + b"\n"


def call(name: str, *arguments: Any, **named: Any) -> bytes:
    """A call as it travels."""
    return line([name, arguments, named])


def parse(text: str | bytes) -> Any:
    """The message of a line."""
    return json.loads(text, object_hook=lambda found: bytes.fromhex(found["bytes"]) if found.keys() == {"bytes"} else found)


def value_of(answer: dict) -> Any:
    """What an answer gives. Raises `Raised`."""
    if "raised" in answer:
        raise Raised(answer["raised"], answer["text"])
    return answer["is"]


def say(value: Any) -> None:
    """One more answer of the running call, or of none."""
    _answers.write(line({"is": value}))
    _answers.flush()


def serve(make: Callable[[], Any]) -> Any:
    """Says "ready", then serves each line of standard input by a method of the object that `make` returns. Returns that object."""
    global _answers
    # Libraries print, also in C and in processes of their own; what they print is no answer.
    _answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    calls = make()
    say("ready")
    for text in sys.stdin:
        name, arguments, named = parse(text)
        try:
            say(getattr(calls, name)(*arguments, **named))
        except Exception as error:
            _answers.write(line({"raised": type(error).__name__, "text": traceback.format_exc()}))
            _answers.flush()
    return calls
