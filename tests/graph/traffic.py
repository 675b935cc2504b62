# SPDX-License-Identifier: Apache-2.0
"""Requests while something else happens."""

import threading
from concurrent.futures import ThreadPoolExecutor

import leftovers


class Traffic:
    """Asks all prompts once from several threads."""

    def __init__(self, served, prompts, at_once=4):
        self.served, self.done, self.failed = served, 0, []
        self.lock = threading.Lock()
        self.pool = ThreadPoolExecutor(at_once)
        self.futures = [self.pool.submit(self._ask, prompt) for prompt in prompts]

    def _ask(self, prompt):
        reason = self.served.ask_or_fail(prompt)
        with self.lock:
            self.done += 1
            if reason:
                self.failed.append(reason)

    def wait_for(self, count, timeout_s=120):
        """Until so many have ended, or one was answered with a wrong text."""
        leftovers.wait_for(lambda: self.done >= count or any(one.done() and one.exception() for one in self.futures), timeout_s)

    def end(self, timeout_s=600):
        """Every request has ended, none with a wrong text; the reasons of those that were refused."""
        for future in self.futures:
            future.result(timeout_s)
        self.pool.shutdown()
        print(f"{len(self.failed)} of {self.done} requests were refused: {self.failed}")
        return self.failed
