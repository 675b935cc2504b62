# SPDX-License-Identifier: Apache-2.0
"""Stands for NIXL's gtest binary in test_upstream_gtest.py: lists and runs tests in the form of gtest, with an agent of backend UCX."""

import fnmatch
import os
import sys
import time
import urllib.request

SUITES = {
    "ucx/TestTransfer.": ["moves/0", "waits/0", "DISABLED_never/0"],
    "TestErrorHandling.": ["parameters", "breaks_with_ours", "hangs_with_ours", "is_skipped", "crashes_once_with_ucx"],
    "TestMessages.": ["from_both/0", "from_nixl_with_ours/0", "from_ours/0", "announced/0", "on_parameters/0"],
    "MetadataExchange.": ["EtcdSends"],
}


def is_ours():
    """Whether backend UCX is our plugin."""
    with open(os.path.join(os.environ["NIXL_PLUGIN_DIR"], "libplugin_UCX.so"), "rb") as file:
        return b"CXL: " in file.read()


def move():
    """A transfer within one agent."""
    import numpy
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("one", nixl_agent_config(backends=[]))
    agent.create_backend("UCX")
    data = numpy.arange(2 << 16, dtype=numpy.uint8)
    agent.register_memory([(data.ctypes.data, data.nbytes, 0, "")], "DRAM", backends=["UCX"])
    sides = [agent.get_xfer_descs([(data.ctypes.data + at, 1 << 16, 0)], "DRAM") for at in (0, 1 << 16)]
    transfer = agent.initialize_xfer("WRITE", *sides, "one", backends=["UCX"])
    state = agent.transfer(transfer)
    while state == "PROC":
        state = agent.check_xfer_state(transfer)
    assert state == "DONE"


def fail(expected):
    """Says what gtest says of an expectation that is not met."""
    print(f"error_handling.cpp:42: Failure\nExpected equality of these values:\n  {expected}\n\n[  FAILED  ] the test")
    return 1


def warn(text):
    """What the binary says when NIXL has logged what the test did not announce; its exit status then."""
    print("ATTENTION: Unexpected NIXL warning or error detected!")
    print(f"ATTENTION: Message is '{text}'\nATTENTION: Problem count is 1")
    return 42


def messages(name):
    """The tests of messages."""
    if name == "from_both/0":
        return warn(f"createBackend: unsupported backend {os.getpid()}")
    if name == "from_nixl_with_ours/0" and is_ours():
        return warn("loadRemoteMD: no common backend found")
    if name == "from_ours/0" and is_ours():
        print("W1126 00:31:09.260118   13231 nixl_cxl] CXL: the pool is full")
    if name == "announced/0" and is_ours():
        print("E1126 00:31:09.260118   13231 nixl_cxl] CXL: no connection information was loaded")
        print("E1126 00:31:09.260119   13231 nixl_agent.cpp:42] loadRemoteMD: error loading remote metadata")
    if name == "on_parameters/0" and is_ours():
        print("W1126 00:31:09.260118   13231 nixl_cxl] CXL: unknown option num_workers is ignored")
    return 0


def etcd(name):
    """Whether the etcd of the environment answers, in a namespace that is the test's own."""
    with urllib.request.urlopen(f"{os.environ['NIXL_ETCD_ENDPOINTS']}/health", timeout=30) as answer:
        assert b"true" in answer.read()
    assert name in os.environ["NIXL_ETCD_NAMESPACE"]


def crash_once():
    """Ends by a signal the first time, as UCX does at times; the working folder is the pass's own."""
    if not os.path.exists("crashed"):
        open("crashed", "w").close()
        os.abort()


def main():
    """Lists the tests, or runs the one that the filter names."""
    options = dict(option.split("=", 1) if "=" in option else (option, "") for option in sys.argv[1:])
    patterns = options["--gtest_filter"].split(":")
    if "--gtest_list_tests" in options:
        print("Running main() from fake_gtest")
        for suite, tests in SUITES.items():
            listed = [test for test in tests if any(fnmatch.fnmatch(suite + test, pattern) for pattern in patterns)]
            print("\n".join([suite, *(f"  {test}  # GetParam() = 1" for test in listed)]))
        return 0
    name = patterns[0].rsplit(".", 1)[1]
    if patterns[0].startswith("TestMessages."):
        return messages(name)
    if name == "is_skipped" or (name == "EtcdSends" and "NIXL_ETCD_ENDPOINTS" not in os.environ):
        print("[  SKIPPED ] " + patterns[0])
    elif name == "EtcdSends":
        etcd(patterns[0])
    elif name == "crashes_once_with_ucx" and not is_ours():
        crash_once()
    elif name == "moves/0":
        move()
    elif name == "hangs_with_ours" and is_ours():
        time.sleep(3600)
    elif name == "breaks_with_ours" and is_ours():
        return fail("status")
    elif name == "parameters" and is_ours():
        return fail("ucx_err_handling_mode_peer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
