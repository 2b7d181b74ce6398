#!/usr/bin/env python3
"""Write random weights of a given standard deviation into a model folder: real_weights.py DIR 0.3

`--load-format dummy` gives nearly flat logits: any prompt gets much the same answer. With 0.3, one changed prompt token
moves logprobs by more than 1, so a test that compares outputs can fail.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoConfig, LlamaForCausalLM


def main(folder: str, deviation: float) -> None:
    config = AutoConfig.from_pretrained(folder)
    config.initializer_range = deviation
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
