"""The codec gives back every round message, arrays included, and refuses everything else with a ChannelError."""

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from specserve.deployments.codec import decode, encode
from specserve.service import messages
from specserve.service.errors import ChannelError
from specserve.service.messages import (
    Constraint,
    Draft,
    DraftBatch,
    Features,
    History,
    Prediction,
    ProposeBatch,
    ProposeRow,
    Sampling,
    ScoreBatch,
    ScoreRow,
    TokenLogprob,
    Verdict,
    VerdictBatch,
    VerifyBatch,
    VerifyRow,
)

IDS = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
PROBS = np.array([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]], np.float32)
SAMPLING = Sampling(greedy=False, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=2**63, acceptance="rejection")
HISTORY = History(np.array([3, 9], np.int32), np.array([0, 2], np.int32))
SCORE_ROW = ScoreRow("a", 7, (1, 2, 3), 2, (0, 9))
DRAFT = Draft("a", 7, (1, 2), IDS, PROBS)
VERIFY_ROW = VerifyRow("a", 7, SAMPLING, (1, 2), IDS, PROBS, 2)
LOGPROB = TokenLogprob(-1.5, ((3, -1.5), (4, float("-inf"))))
VERDICT = Verdict("a", 7, 1, (1, 5), (LOGPROB, TokenLogprob(0.0, ())))
PROPOSE_ROW = ProposeRow("a", 7, 3, (1, 2, 3, 4), 4, Sampling(), Prediction(2, (5, 6)))

MESSAGES: list[Any] = [
    Sampling(),
    SAMPLING,
    Sampling(repetition_penalty=1.5, presence_penalty=-2.0, frequency_penalty=0.5, logit_bias=((3, -100.0), (4, 2.5))),
    SCORE_ROW,
    dataclasses.replace(SCORE_ROW, parents=(0, 0), moved_from=(5, 6)),
    ScoreBatch(1, (SCORE_ROW, SCORE_ROW)),
    Features(1, False, np.arange(5120, dtype=np.float32).reshape(8, 640)),
    Features(1, True, np.arange(65536).astype(np.uint16).reshape(32, 2048)),
    Features(1, False, np.linspace(0, 1, 6).reshape(2, 3)),
    Features(1, False, np.zeros((0, 640), np.float32)),
    DRAFT,
    Draft("b", 0, ()),
    Draft("b", 0, (1, 2), parents=(0, 0)),
    HISTORY,
    Constraint("start: /a+/", (1, 2)),
    VERIFY_ROW,
    dataclasses.replace(VERIFY_ROW, constraint=Constraint("start: /a+/", ())),
    dataclasses.replace(VERIFY_ROW, history=HISTORY, barred_token_ids=(0, 7), num_barred=3),
    dataclasses.replace(VERIFY_ROW, support_ids=None, support_probs=None, num_logprobs=None),
    dataclasses.replace(VERIFY_ROW, parents=(0, 0)),
    VerifyBatch(1, (VERIFY_ROW,)),
    LOGPROB,
    VERDICT,
    VerdictBatch(1, (VERDICT,), 0.25),
    Prediction(2, (5, 6)),
    PROPOSE_ROW,
    dataclasses.replace(PROPOSE_ROW, prediction=None),
    ProposeBatch(1, "head", (PROPOSE_ROW,), ("z",)),
    ProposeBatch(1, "head", ()),
    DraftBatch(1, (DRAFT, Draft("b", 0, ())), 3),
]


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if dataclasses.is_dataclass(left):
        for field in dataclasses.fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name))
    elif isinstance(left, tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        np.testing.assert_array_equal(left, right)
    else:
        assert left == right


def test_every_message_class_is_in_the_list() -> None:
    known = {value for value in vars(messages).values() if isinstance(value, type) and dataclasses.is_dataclass(value)}
    assert known == {type(message) for message in MESSAGES}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_round_trip(message: Any) -> None:
    assert_same(decode(encode(message), type(message)), message)


def test_decoded_arrays_are_aligned_and_read_only() -> None:
    for pad in range(8):  # shifts the array within the message
        draft = decode(encode(Draft("x" * pad, 0, (), IDS, PROBS)), Draft)
        assert draft.support_ids is not None
        assert draft.support_probs is not None
        for array in (draft.support_ids, draft.support_probs):
            assert array.flags.aligned
            with pytest.raises(ValueError, match="read-only"):
                array[0, 0] = 1


def test_an_array_that_is_not_contiguous_arrives_in_order() -> None:
    assert_same(decode(encode(Features(1, False, PROBS.T)), Features), Features(1, False, PROBS.T))


def test_numpy_scalars_travel_as_plain_numbers() -> None:
    draft: Any = Draft("a", np.int64(7), (np.int32(1),))  # type: ignore[arg-type]
    assert_same(decode(encode(draft), Draft), Draft("a", 7, (1,)))


@pytest.mark.parametrize("dtype", [object, np.complex64, ">f4"])
def test_an_array_of_another_dtype_is_not_sent(dtype: Any) -> None:
    with pytest.raises(TypeError):
        encode(Features(1, False, np.zeros((1, 1), dtype)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encode(SCORE_ROW),
        encode(DRAFT)[:-1],
        encode(Draft("a", 0, (), PROBS, PROBS)),  # type: ignore[arg-type]
        msgspec.msgpack.encode({"request_id": "a", "committed_len": "7", "token_ids": []}),
        msgspec.msgpack.encode(
            {"request_id": "a", "committed_len": 7, "token_ids": [], "support_ids": msgspec.msgpack.Ext(4, b"\x02")}
        ),
        msgspec.msgpack.encode(
            {"request_id": "a", "committed_len": 7, "token_ids": [], "support_ids": msgspec.msgpack.Ext(99, b"\x00")}
        ),
    ],
)
def test_bytes_that_are_no_draft_are_a_channel_error(data: bytes) -> None:
    with pytest.raises(ChannelError, match="not a Draft"):
        decode(data, Draft)
