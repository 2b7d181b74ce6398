#!/usr/bin/env python3
"""Make a small Llama model folder without downloading anything.

config.json, a byte-level BPE tokenizer trained here on synthetic text, a ChatML template; weights are left to
`--load-format dummy` or to real_weights.py. The defaults are "tiny" (fast, for functional tests); "small" has KV and
prefill costs in the proportions of a GPU, so that re-prefill hurts:

    make_model.py OUT
    make_model.py OUT --hidden 512 --layers 8 --heads 8 --kv-heads 4 --ffn 1536 --head-dim 64 --vocab 4096
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
PAD, BOS, EOS = 0, 1, 2
SYLLABLES = [
    "ka",
    "lo",
    "mi",
    "ne",
    "ru",
    "ta",
    "so",
    "vi",
    "po",
    "de",
    "an",
    "er",
    "in",
    "on",
    "st",
    "qu",
    "th",
    "ing",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if m['content'] is string else m['content'] | map(attribute='text') | join('') }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    arguments = parse()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    train_tokenizer(arguments.vocab).save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    write_json(out / "tokenizer_config.json", tokenizer_config(arguments.context))
    write_json(out / "config.json", model_config(arguments))
    token_ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    write_json(out / "generation_config.json", {**token_ids, "do_sample": False})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make a small Llama model folder.")
    parser.add_argument("out", type=Path)
    sizes = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 128, "vocab": 2048}
    for name, default in (sizes | {"context": 32_768}).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    return parser.parse_args()


def train_tokenizer(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=None, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    # The model samples over the whole vocabulary: every id must decode to something.
    tokenizer.add_tokens([f"<w{i}>" for i in range(vocab_size - tokenizer.get_vocab_size())])
    return tokenizer


def corpus() -> Iterator[str]:
    rng = random.Random(0)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(4000)]
    for line in range(4000):
        yield " ".join(rng.choices(words, k=60)) + (".\n" if line % 2 else f'! {{"k": {line}}}\n')


def tokenizer_config(context: int) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "pad_token": SPECIAL[PAD],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }


def model_config(sizes: argparse.Namespace) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": sizes.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
    }


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=1))


if __name__ == "__main__":
    main()
