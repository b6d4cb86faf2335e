"""A folder with a tiny random Llama, a byte-level tokenizer and a chat template, as a user might have one."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CONTEXT = 512


def save_tiny_model(
    folder: Path, *, seed: int = 1, chat: bool = True, words: tuple[str, ...] = ("the", "Ġthe")
) -> Path:
    """Its words are bytes, but for a few; what it writes is noise that soon repeats itself."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *words]
    backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)  # type: ignore[no-untyped-call]
    if chat:
        tokenizer.chat_template = TEMPLATE
    torch.manual_seed(seed)
    model = LlamaForCausalLM(  # type: ignore[no-untyped-call]
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            tie_word_embeddings=False,
            initializer_range=0.1,
        )
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
