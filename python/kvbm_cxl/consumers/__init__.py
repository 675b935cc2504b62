# SPDX-License-Identifier: Apache-2.0
"""What adapters for other caches share: LMCache's (`kvbm_cxl.lmcache`) and the tier of vLLM's own offloading
(`kvbm_cxl.vllm_integration.tier`), and the storage backend of SGLang's HiCache (`kvbm_cxl.sglang`).

| module | what it does |
|---|---|
| `names` | namespaces out of fields, keys of 16 bytes out of any |
| `blocks` | stores, loads, pins and evictions of many blocks; each failure becomes a word for one block, and is counted |
| `pins` | pins that this process holds, by what the consumer calls a block |
| `tasks` | work on threads, each piece of which ends exactly once |
| `ledger` | what this process stored and the pool still has, for consumers that count bytes or list keys |

An adapter never lets a failure of the pool out: a store that fails is refused, a load that fails is a miss, and the consumer continues
without the pool until it can be opened again.
"""
