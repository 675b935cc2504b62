# SPDX-License-Identifier: Apache-2.0
"""The namespace of a tier's chunks: everything besides the tokens that shapes their bytes.

As with CxlConnector the model is known by its weights, not by the path that it was loaded from. What a chunk is made of comes from vLLM's
own description of it for files, with every number of parallelism: engines of another layout of ranks share nothing.
"""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..options import ConfigError
from .identity import fingerprint

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec


def chunk_fields(spec: "OffloadingSpec", model_id: str, revision: str | None, row_bytes: int) -> dict[str, Any]:
    """What vLLM tells a tier of its chunks, with the model by content in the place of its name. `ConfigError` where that is not known."""
    from vllm.v1.kv_offload.file_mapper import FileMapper

    mapper = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk)
    run = mapper.get_run_config()
    name = run.pop("model_name")
    return {
        **run,
        "model": model_id or _model_of(name, revision),
        "rank": mapper.rank,
        "row_bytes": row_bytes,
        "replicated": spec.replicated_layout,
        "canonical": spec.config.canonical_layout,
    }


def _model_of(name: str, revision: str | None) -> str:
    try:
        return fingerprint(SimpleNamespace(model=name, revision=revision))
    except ConfigError as error:
        raise ConfigError(
            f"the tier cannot tell which weights {name!r} has: it finds no files of them, neither in a folder of that name nor in the "
            'Hugging Face cache. Name them with the tier\'s option "model_id", with a new name for each version of the weights'
        ) from error
