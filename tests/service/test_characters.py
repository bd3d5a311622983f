"""Text is shown in whole characters, however a byte-level vocabulary splits them between tokens and rounds."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rounds import tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specserve.service.commit import Output, commit
from specserve.service.messages import Sampling
from specserve.service.requests import GenerationRequest

MIXED = "aé€🎉ñ."


def bytewise() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE({char: place for place, char in enumerate(alphabet)}, []))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bare.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bare)


BYTEWISE = bytewise()


def shown(
    tokens: list[int], cuts: list[int], made: PreTrainedTokenizerFast, stop: tuple[str, ...] = (), limit: int = 10_000
) -> list[str]:
    """Return what each round shows when the tokens are cut into rounds at `cuts`."""
    request = GenerationRequest("r", (1,), Sampling(), min(limit, len(tokens)), stop=stop, ignore_eos=True)
    output = Output()
    texts = []
    for start, end in pairwise([0, *cuts, len(tokens)]):
        if output.finish_reason is None:
            texts.append(commit(output, request, tuple(tokens[start:end]), (), made, ()).text)
    return texts


def test_every_way_to_cut_a_text_into_rounds_shows_whole_characters() -> None:
    tokens = BYTEWISE.encode(MIXED)
    assert len(tokens) == 13
    for chosen in range(2 ** (len(tokens) - 1)):
        cuts = [place for place in range(1, len(tokens)) if chosen >> (place - 1) & 1]
        texts = shown(tokens, cuts, BYTEWISE)
        assert "".join(texts) == MIXED
        assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts)


def test_an_output_that_ends_within_a_character_shows_those_before_it() -> None:
    tokens = BYTEWISE.encode(MIXED)
    for limit in range(1, len(tokens) + 1):
        text = "".join(shown(tokens, list(range(1, len(tokens))), BYTEWISE, limit=limit))
        assert MIXED.startswith(text)
        assert len(text.encode()) > limit - 4


@pytest.mark.parametrize("stop", ["é", "€🎉", "🎉ñ.", "ñ"])
def test_a_stop_string_of_split_characters_is_found_and_hidden(stop: str) -> None:
    tokens = BYTEWISE.encode(MIXED)
    for cut in range(1, len(tokens)):
        assert "".join(shown(tokens, [cut], BYTEWISE, (stop,))) == MIXED[: MIXED.index(stop)]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12), st.data())
def test_any_text_in_the_embedded_vocabulary_is_shown_whole(text: str, data: st.DataObject) -> None:
    made = tokenizer()
    tokens = made.encode(text, add_special_tokens=False)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(tokens) - 1)), max_size=len(tokens))))
    texts = shown(tokens, [cut for cut in cuts if cut < len(tokens)], made)
    whole = made.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(texts) == whole
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in shown_text for shown_text in texts)


@given(st.lists(st.integers(0, 255), min_size=1, max_size=24))
def test_bytes_that_are_no_text_never_break_a_stream(tokens: list[int]) -> None:
    texts = shown(tokens, list(range(1, len(tokens))), BYTEWISE)
    whole = BYTEWISE.decode(tokens, clean_up_tokenization_spaces=False)
    assert whole.startswith("".join(texts))
