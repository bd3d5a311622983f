"""Tokenizers whose every token is one byte."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(without: str = "") -> PreTrainedTokenizerFast:
    """Return a tokenizer of 256 tokens, a byte each and no EOS; the characters `without` are spelled `<n>` instead."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = {f"<{place}>" if char in without else char: place for place, char in enumerate(alphabet)}
    bare = Tokenizer(models.BPE(names, []))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bare.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bare)


def letter_tokenizer(letters: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words `letters`, in their order, and no EOS."""
    bare = Tokenizer(models.BPE({word: place for place, word in enumerate(letters)}, []))
    bare.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bare)
