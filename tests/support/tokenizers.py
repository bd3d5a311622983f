"""Small tokenizers that differ from the embedded one: another vocabulary, and SentencePiece's way to spell tokens."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def _texts() -> list[str]:
    texts = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return ["".join(char for char in text if ord(char) < 128) for text in texts]


def byte_level(size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of its own, as GPT-2's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(_texts(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def sentence_piece(size: int) -> PreTrainedTokenizerFast:
    """Return a BPE as Llama 2's: a space is a block, unknown characters are single bytes, `<s>` begins a text."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", SPACE)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(SPACE, "merged_with_next")]
    )
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<unk>", "<s>", "</s>", *fallback], show_progress=False
    )
    made.train_from_iterator(_texts(), trainer)
    state = json.loads(made.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in fallback]
    made = Tokenizer.from_str(json.dumps(state))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
