# SPDX-License-Identifier: Apache-2.0
"""What Dynamo's prefill handler asks a connector: the parameters of a prefill request, and what the decode request gets from its answer.

Decode finds blocks by the hashes of its own tokens, so no address crosses over. What does cross over is an expectation
(`handover.Expected`): a decode worker that does not find what prefill published says so instead of computing it again in silence.
"""

from typing import Any

from dynamo.vllm.kv_connector_protocols import KV_CONNECTOR_PROTOCOLS, KvConnectorProtocol

from . import CONNECTOR_NAME
from .handover import prefill_params


class CxlConnectorProtocol(KvConnectorProtocol):
    """Dynamo's view of `CxlConnector`. One instance per prefill request, without state."""

    # Mediated by a cache: another transport in a MultiConnector may own the transfer.
    produces_kv_transfer_params = False

    def prefill_request_kv_transfer_params(self) -> dict[str, Any]:
        """Asks the prefill worker to have everything published when it answers."""
        return prefill_params()

    def decode_request_kv_transfer_params(self, prefill_response: Any) -> dict[str, Any]:
        """What the prefill worker says it published. Never None: Dynamo's router needs an envelope, even an empty one."""
        return getattr(prefill_response, "kv_transfer_params", None) or {}


def register() -> None:
    """Enters the protocol in Dynamo's table, once."""
    KV_CONNECTOR_PROTOCOLS.setdefault(CONNECTOR_NAME, CxlConnectorProtocol)
