# SPDX-License-Identifier: Apache-2.0
"""What crosses from prefill to decode, and what registers the connector."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from kvbm_cxl.vllm_integration import handover


def test_words_arrive():
    said = handover.Expected(300, "ab" * 16)
    assert handover.expected_of(said.to_params()) == said
    assert handover.wants_publish(handover.prefill_params()) and handover.expected_of(handover.prefill_params()) is None
    assert not handover.wants_publish(said.to_params())


@pytest.mark.parametrize(
    "params",
    (
        None,
        {},
        7,
        "kvbm_cxl",
        [],
        {"do_remote_prefill": True, "remote_host": "h"},
        {"kvbm_cxl": None},
        {"kvbm_cxl": []},
        {"kvbm_cxl": {}},
        {"kvbm_cxl": {"version": 2, "tokens": 5, "namespace": "n", "publish": True}},
        {"kvbm_cxl": {"version": 1, "tokens": "5", "namespace": "n"}},
        {"kvbm_cxl": {"version": 1, "tokens": True, "namespace": "n"}},
        {"kvbm_cxl": {"version": 1, "tokens": -5, "namespace": "n"}},
        {"kvbm_cxl": {"version": 1, "tokens": 5, "namespace": 7, "publish": "yes"}},
    ),
)
def test_words_of_others_are_harmless(params):
    assert handover.expected_of(params) is None and not handover.wants_publish(params)


def _run(program: str) -> str:
    environment_path = f"import sys; sys.path[:0] = {sys.path!r}\n"
    done = subprocess.run([sys.executable, "-c", environment_path + program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_importing_does_nothing_and_registering_twice_is_once():
    out = _run(
        "import kvbm_cxl.vllm_integration as ours\n"
        "assert 'vllm' not in sys.modules and 'kvbm_cxl._native' not in sys.modules\n"
        "ours.register(); ours.register()\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory\n"
        "assert 'kvbm_cxl.vllm_integration.connector' not in sys.modules and 'dynamo' not in sys.modules\n"
        "print(factory.get_connector_class_by_name('CxlConnector').__name__)"
    )
    assert out.splitlines()[-1] == "CxlConnector"


def test_dynamo_takes_the_protocol_from_its_table():
    out = _run(
        "import dynamo.vllm\n"
        "import kvbm_cxl.vllm_integration as ours\n"
        "ours.register(); ours.register()\n"
        "from types import SimpleNamespace as N\n"
        "from dynamo.vllm.kv_connector_protocols import make_kv_connector_protocol as make\n"
        "protocol = make(N(kv_transfer_config=N(kv_connector='CxlConnector')))\n"
        "print(protocol.prefill_request_kv_transfer_params(), protocol.decode_request_kv_transfer_params(N(kv_transfer_params=None)))"
    )
    assert out.splitlines()[-1] == f"{handover.prefill_params()} {{}}"


def test_decode_gets_what_prefill_said():
    pytest.importorskip("dynamo.vllm.kv_connector_protocols")
    from kvbm_cxl.vllm_integration.dynamo_protocol import CxlConnectorProtocol

    said = handover.Expected(9, "00" * 16).to_params()
    protocol = CxlConnectorProtocol(None)
    assert protocol.decode_request_kv_transfer_params(SimpleNamespace(kv_transfer_params=said)) == said
    assert protocol.decode_request_kv_transfer_params(SimpleNamespace()) == {}
