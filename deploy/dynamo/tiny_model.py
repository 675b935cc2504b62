# SPDX-License-Identifier: Apache-2.0
"""A tiny random Llama with a tokenizer of its own, made here in a second: what the graph serves where no model is named.

It says nothing sensible, but what it says depends on its whole prompt, so a wrong KV block becomes a wrong answer. Weights come from a
seeded generator and the tokenizer from a seeded text: the same folder on every machine.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 20
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INTERMEDIATE, VOCABULARY, POSITIONS = 4, 256, 4, 2, 64, 512, 2048, 4096
SPECIAL = ["<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "<|begin|>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = (
    "a pool of memory is shared by all hosts in the rack and each host maps it but no host sees what another has written until it was "
    "flushed prefill publishes blocks of keys and values decode pulls them and every later request with that prefix finds them before it "
    "computes where does this block come from who wrote it when was it read how many bytes were moved and what did that cost in time"
).split()


def sentences(count: int, seed: int = SEED) -> list[str]:
    """Sentences of about 16 words, each of another choice: what the tokenizer learns, and what prompts are made of."""
    choose = numpy.random.default_rng(seed)
    syllables = [first + vowel + last for first in "bdfgklmnprstvz" for vowel in "aeiou" for last in ("", "n", "r", "s", "th")]
    invented = ["".join(choose.choice(syllables, size)) for size in (2, 3) for _ in range(200)]
    made = []
    for _ in range(count):
        words = [str(choose.choice(WORDS if choose.random() < 0.7 else invented)) for _ in range(int(choose.integers(12, 21)))]
        made.append(" ".join(words).capitalize() + ".")
    return made


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(sentences(1500), trainer)
    return tokenizer


def _unspeakable(tokenizer: Tokenizer) -> list[int]:
    """Tokens that an answer must not hold: special ones, which would end it early, and parts of characters, which are no text alone."""
    size = tokenizer.get_vocab_size()
    return [token for token in range(VOCABULARY) if token >= size or not _plain(tokenizer.decode([token]))]


def _plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and text != ""


def _weights(seed: int, unspeakable: list[int]) -> dict[str, numpy.ndarray]:
    random = numpy.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> numpy.ndarray:
        return random.standard_normal((rows, columns), numpy.float32) * numpy.float32(gain / columns**0.5)

    ones = numpy.ones(HIDDEN, numpy.float32)
    embedding = random.standard_normal((VOCABULARY, HIDDEN), numpy.float32)
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": ones}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        # Scores with a spread of about 2: attention looks at few tokens, not at the mean of all, which would be the same for every prompt.
        weights[at + "self_attn.q_proj.weight"] = matrix(HEADS * HEAD_SIZE, HIDDEN, 1.5)
        weights[at + "self_attn.k_proj.weight"] = matrix(KV_HEADS * HEAD_SIZE, HIDDEN, 1.5)
        weights[at + "self_attn.v_proj.weight"] = matrix(KV_HEADS * HEAD_SIZE, HIDDEN, 1.5)
        weights[at + "self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_SIZE, 1.5)
        weights[at + "mlp.gate_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        weights[at + "mlp.up_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        weights[at + "mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
        weights[at + "input_layernorm.weight"] = ones.copy()
        weights[at + "post_attention_layernorm.weight"] = ones.copy()
    head = matrix(VOCABULARY, HIDDEN, 2.0)
    head[unspeakable] = 0  # A logit of 0 is never the largest of 2048.
    weights["lm_head.weight"] = head
    return weights


def _config(tokenizer: Tokenizer) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": tokenizer.token_to_id("<|begin|>"),
        "eos_token_id": tokenizer.token_to_id("<|end|>"),
        "pad_token_id": tokenizer.token_to_id("<|pad|>"),
    }


def _write(folder: Path, seed: int) -> None:
    tokenizer = _tokenizer()
    config = _config(tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": POSITIONS, "chat_template": CHAT_TEMPLATE, **special}
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"]}
    files = {"config": config, "tokenizer_config": described, "special_tokens_map": special, "generation_config": generation}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    save_file(_weights(seed, _unspeakable(tokenizer)), str(folder / "model.safetensors"), metadata={"format": "pt"})


def tiny_model(cache: Path, seed: int = SEED) -> Path:
    """The model's folder below `cache`, made if it is not there: whole or not at all, also where another process makes it at the same time.

    Another seed gives a model of the same shape that says something else.
    """
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = cache / f"tiny-llama-{version}-{seed}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="making-", dir=cache))
    try:
        _write(made, seed)
        made.chmod(0o755)
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder
