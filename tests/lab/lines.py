# SPDX-License-Identifier: Apache-2.0
"""Calls and answers as lines of JSON, with bytes in it as {"bytes": hexadecimal digits}.

A call is [name, argument, ...]; its answer {"is": what it gave}, or {"raised": kind of the error, "text": all of it}.
"""

import json
import sys
import traceback


def line(message) -> bytes:
    """A message as it travels."""
    return json.dumps(message, default=lambda value: {"bytes": bytes(value).hex()}).encode() + b"\n"


def parse(text: str | bytes):
    """The message of a line."""
    return json.loads(text, object_hook=lambda found: bytes.fromhex(found["bytes"]) if found.keys() == {"bytes"} else found)


def serve(calls) -> None:
    """Answers what comes on standard input, until that ends, with the methods of `calls`; says first that it is ready."""
    # Libraries may print; what they print is no answer.
    answers, sys.stdout = sys.stdout.buffer, sys.stderr

    def answer(message) -> None:
        answers.write(line(message))
        answers.flush()

    answer({"is": "ready"})
    for text in sys.stdin:
        name, *arguments = parse(text)
        try:
            said = {"is": getattr(calls, name)(*arguments)}
        except Exception as error:
            said = {"raised": type(error).__name__, "text": traceback.format_exc()}
        answer(said)
