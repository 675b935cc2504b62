# SPDX-License-Identifier: Apache-2.0
"""The first token of a prompt by a model of the shape of Llama 3.1 8B with random weights: computed, or with its blocks from the pool.
Used by gpu.py.

One process computes prompts of 8192 and 32768 tokens and publishes their blocks. Another one pulls them to other block numbers, compares a
digest of each piece of each block, and computes the last token of the prompt alone, as an engine does after a hit of the whole prompt.
`first_token_8192_pool_over_computed` is its time from the pull to the token by default (checksums), divided by that of the whole prompt;
`..._plain_...` without checksums, `..._queued_...` with `queue_pull`, whose stream the computing follows.
"""

import hashlib
import json
import random
import shutil
import statistics
import time
from dataclasses import dataclass

import kvbm_cxl
from gpu_bench import GIB, MIB, WAYS, LeftOut, ratio, row, say, wrong

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Sizes:
    """Of a model and its prompts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    words: int
    prompts: tuple


LARGE = Sizes(32, 4096, 32, 8, 128, 14336, 32000, (8192, 32768))
SMALL = Sizes(2, 64, 4, 2, 32, 128, 500, (64, 256))


class Model:
    """A decoder with grouped-query attention over paged keys and values, (2, blocks, tokens, heads, size) a layer, as vLLM has them."""

    def __init__(self, sizes, device):
        import torch

        self.torch, self.sizes, self.device = torch, sizes, device
        generator = torch.Generator(device=device).manual_seed(7)

        def weights(rows, columns):
            made = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
            return made.normal_(0, columns**-0.5, generator=generator)

        queries, keys, hidden = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size, sizes.hidden
        shapes = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
        shapes |= {"gate": (sizes.inner, hidden), "up": (sizes.inner, hidden), "down": (hidden, sizes.inner)}
        self.layers = [{name: weights(*shape) for name, shape in shapes.items()} for _ in range(sizes.layers)]
        self.words, self.out = weights(sizes.words, hidden), weights(sizes.words, hidden)
        self.blocks = 2 * max(sizes.prompts) // BLOCK_TOKENS
        shape = (2, self.blocks, BLOCK_TOKENS, sizes.kv_heads, sizes.head_size)
        self.kv = [torch.zeros(shape, device=device, dtype=torch.bfloat16) for _ in range(sizes.layers)]
        parts = [(half.data_ptr(), half[0].nbytes, half[0].nbytes) for layer in self.kv for half in layer]
        self.layout = kvbm_cxl.BlockLayout(parts, self.blocks, device=device, owner=self.kv)

    def sync(self):
        if self.device != "cpu":
            self.torch.cuda.synchronize()

    def table(self, seed, tokens):
        """The blocks of a prompt, by chance."""
        return random.Random(seed).sample(range(self.blocks), tokens // BLOCK_TOKENS)

    def prompt(self, tokens):
        chosen = random.Random(tokens)
        return self.torch.tensor([chosen.randrange(self.sizes.words) for _ in range(tokens)], device=self.device)

    def _turned(self, x, positions):
        """Rotary embedding."""
        torch, half = self.torch, self.sizes.head_size // 2
        angles = positions[:, None].float() * 500000.0 ** (-torch.arange(half, device=self.device) / half)
        cosine, sine = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
        left, right = x[..., :half], x[..., half:]
        return torch.cat((left * cosine - right * sine, right * cosine + left * sine), -1)

    def token(self, prompt, start, blocks):
        """The token after a prompt of which the tokens before `start` are in the blocks."""
        torch, sizes, functional = self.torch, self.sizes, self.torch.nn.functional
        with torch.inference_mode():
            table, count = torch.tensor(blocks, device=self.device), prompt.numel()
            positions = torch.arange(count, device=self.device)
            slots = table[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
            here, new = positions[start:], count - start
            x = self.words[prompt[start:]]
            for weights, kv in zip(self.layers, self.kv, strict=True):
                keys, values = (half.view(-1, sizes.kv_heads, sizes.head_size) for half in kv)
                y = functional.rms_norm(x, (sizes.hidden,))
                queries = self._turned((y @ weights["q"].T).view(new, sizes.heads, sizes.head_size), here)
                keys[slots[start:]] = self._turned((y @ weights["k"].T).view(new, sizes.kv_heads, sizes.head_size), here)
                values[slots[start:]] = (y @ weights["v"].T).view(new, sizes.kv_heads, sizes.head_size)
                lists = (each.transpose(0, 1)[None] for each in (queries, keys[slots], values[slots]))
                seen = functional.scaled_dot_product_attention(*lists, is_causal=new > 1, enable_gqa=True)
                x = x + seen[0].transpose(0, 1).reshape(new, -1) @ weights["o"].T
                y = functional.rms_norm(x, (sizes.hidden,))
                x = x + (functional.silu(y @ weights["gate"].T) * (y @ weights["up"].T)) @ weights["down"].T
            return int((functional.rms_norm(x[-1], (sizes.hidden,)) @ self.out.T).argmax())

    def digest(self, blocks):
        """Of each byte of the blocks, in their order: sums of words with odd factors for each piece, then SHA-256 of them."""
        torch = self.torch
        ids, digest = torch.tensor(blocks, device=self.device), hashlib.sha256()
        for half in (half for layer in self.kv for half in layer):
            words = half[ids].view(len(blocks), -1).view(torch.int32).to(torch.int64)
            factors = 2 * torch.arange(words.shape[1], device=self.device) + 0x9E3779B1
            digest.update((words * factors).sum(1).cpu().numpy().tobytes())
        return digest.hexdigest()

    def forget(self):
        """No key or value of an earlier round is left."""
        for layer in self.kv:
            layer.fill_(-1)


def _timed(model, work):
    model.sync()
    start = time.perf_counter()
    result = work()
    model.sync()
    return time.perf_counter() - start, result


def _keys(tokens):
    key, keys = None, []
    for index in range(tokens // BLOCK_TOKENS):
        key = kvbm_cxl.chain_key(key, [tokens, index])
        keys.append(key)
    return keys


def prefill(model, spec, ns, prompts):
    """Computes each prompt and publishes its blocks. Prints what the other process has to find."""
    with kvbm_cxl.Pool(spec) as pool, pool.cache() as cache:
        if model.device != "cpu":
            cache.open_gpu(0)
        for tokens in prompts:
            blocks, prompt = model.table(1, tokens), model.prompt(tokens)
            times = [_timed(model, lambda: model.token(prompt, 0, blocks)) for _ in range(3)]  # noqa: B023
            publish_s, stored = _timed(model, lambda: cache.publish_blocks(ns, _keys(tokens), model.layout, blocks))  # noqa: B023
            if stored != ["stored"] * len(blocks):
                raise SystemExit(f"blocks were not stored: {sorted(set(stored))}")
            computed_s = statistics.median(seconds for seconds, _ in times)
            found = {"computed_s": computed_s, "publish_s": publish_s, "token": times[-1][1], "digest": model.digest(blocks)}
            print("PREFILL " + json.dumps([tokens, found]), flush=True)


def _pulled(model, cache, ns, tokens, found, is_queued):
    """Seconds of the call that pulls, and until the first token. The blocks are compared in a round of their own."""
    keys, prompt, answers = _keys(tokens), model.prompt(tokens), [None] * (tokens // BLOCK_TOKENS)
    times = []
    for number in range(4):
        model.forget()
        blocks = model.table(10 + number, tokens)
        model.sync()
        start = time.perf_counter()
        if is_queued:
            queued = cache.queue_pull(ns, keys, model.layout, blocks, stream=model.torch.cuda.current_stream())
            call_s = time.perf_counter() - start
        else:
            pulled, call_s = cache.pull_blocks(ns, keys, model.layout, blocks), time.perf_counter() - start
        token = model.token(prompt, tokens - 1, blocks) if number else None
        if (queued.wait() if is_queued else pulled) != answers:
            raise SystemExit("blocks of the prompt are not found")
        model.sync()
        times.append((call_s, time.perf_counter() - start))
        if not number and model.digest(blocks) != found["digest"]:
            wrong(f"of a prompt of {tokens} tokens that was pulled")
    say(f"{tokens} tokens: the first token is {'that' if token == found['token'] else 'not that'} of the computed prompt")
    return [statistics.median(column) for column in zip(*times[1:], strict=True)]


def decode(model, spec, ns, prompts):
    """Pulls each prompt, with and without checksums, and queued."""
    for way, has_checksums in WAYS.items():
        with kvbm_cxl.Pool(spec) as pool, pool.cache(checksums=has_checksums) as cache:
            if model.device != "cpu":
                cache.open_gpu(0)
            for tokens, found in prompts.items():
                pull_s, first_s = _pulled(model, cache, ns, tokens, found, False)
                computed_ms, name = 1e3 * found["computed_s"], "" if has_checksums else f"{way}_"
                ratio(f"first_token_{tokens}_{name}pool_over_computed", first_s / found["computed_s"])
                rate = tokens // BLOCK_TOKENS * model.layout.block_bytes / pull_s / 1e9
                text = f"{first_s / found['computed_s']:.3f} ({1e3 * first_s:.1f} of {computed_ms:.1f} ms, pull {rate:.1f} GB/s)"
                row(f"first token, {tokens} tokens, {way}: from the pool over computed", text, "0.22" if tokens == 8192 else "")
                if model.device == "cpu" or not has_checksums:
                    continue
                call_s, first_s = _pulled(model, cache, ns, tokens, found, True)
                ratio(f"first_token_{tokens}_queued_pool_over_computed", first_s / found["computed_s"])
                text = f"{first_s / found['computed_s']:.3f} (call {1e3 * call_s:.2f} ms)"
                row(f"first token, {tokens} tokens, queued: over computed", text)


def measure(bench):
    """Starts both processes, one after the other; each is this part with its role."""
    device, sizes = bench.device(), bench.sized(LARGE, SMALL)
    spec = bench.spec_of(bench.sized(7 << 10, 32))
    shape = {"layer_count": sizes.layers, "kv_head_count": sizes.kv_heads, "head_size": sizes.head_size, "block_tokens": BLOCK_TOKENS}
    ns = kvbm_cxl.Namespace(model="serving", dtype="bf16", layout="kv", **shape)
    if bench.others:
        prompts = {int(tokens): found for tokens, found in json.loads(bench.others[1]).items()}
        return {"prefill": prefill, "decode": decode}[bench.others[0]](Model(sizes, device), spec, ns, prompts)
    free_bytes, need_bytes = shutil.disk_usage(bench.path.parent).free, bench.sized(7 * GIB, 32 * MIB)
    if free_bytes < need_bytes:
        raise LeftOut(f"{bench.path.parent} has {free_bytes // MIB} MiB, {need_bytes // MIB} are needed")
    block_bytes = 2 * sizes.layers * BLOCK_TOKENS * sizes.kv_heads * sizes.head_size * 2
    kvbm_cxl.format_pool(spec, cells=f"{block_bytes}:80%", force=True)
    lines = bench.second("prefill", json.dumps(dict.fromkeys(sizes.prompts)))
    prompts = dict(json.loads(line.removeprefix("PREFILL ")) for line in lines if line.startswith("PREFILL "))
    for tokens, found in prompts.items():
        rate = tokens // BLOCK_TOKENS * block_bytes / found["publish_s"] / 1e9
        say(f"{tokens} tokens: computed in {1e3 * found['computed_s']:.1f} ms, published with {rate:.1f} GB/s")
    for line in bench.second("decode", json.dumps(prompts)):
        say(line)
