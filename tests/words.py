"""A tokenizer small enough to be checked by hand: one token per byte, no download."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
BOS, EOS, PAD = 256, 257, 258
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message['role'] }}:{{ message['content'] }};{% endfor %}"
)


def byte_tokenizer(
    *, bos: bool = False, eos: bool = False, pad: bool = False, chat: bool = False
) -> Any:
    """Each byte is a token; with ``bos``, texts begin with <s>."""
    named = {"<s>": BOS, "</s>": EOS, "<pad>": PAD}
    vocabulary = {letter: index for index, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, **named}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    wanted = {"bos_token": ("<s>", bos), "eos_token": ("</s>", eos), "pad_token": ("<pad>", pad)}
    given = {name: token for name, (token, use) in wanted.items() if use}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **given)
    if chat:
        made.chat_template = CHAT_TEMPLATE
    return made


def ids_of(text: str) -> list[int]:
    """The token ids of a text of ASCII letters, found without the tokenizer."""
    return [LETTERS.index({" ": "Ġ", "\n": "Ċ"}.get(letter, letter)) for letter in text]
