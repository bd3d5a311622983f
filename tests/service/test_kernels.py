"""The CPU kernels: right against plain torch, and a row's bits do not depend on its company."""

import ctypes
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.service.acceptance import coupled_tokens
from specserve.service.coupled import gumbel_max
from specserve.service.kernels.native import BLOCK_SLOTS, DTYPES, argmax, library
from specserve.service.noise import gumbel_rows
from specserve.service.packed_linear import PackedLinear
from specserve.service.trees import paths

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler here")
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}
DTYPE_PARAMS = pytest.mark.parametrize("dtype", list(DTYPES), ids=str)


@DTYPE_PARAMS
@pytest.mark.parametrize(("columns", "inputs"), [(1, 1), (31, 7), (32, 64), (70, 33), (257, 96)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_right_at_any_size(dtype: torch.dtype, columns: int, inputs: int, bias: bool) -> None:
    torch.manual_seed(columns)
    weight, added = torch.randn(columns, inputs).to(dtype), torch.randn(columns).to(dtype)
    x = torch.randn(30, inputs).to(dtype)
    got = PackedLinear(weight, added if bias else None)(x)
    expected = x.double() @ weight.double().T + (added.double() if bias else 0.0)
    assert torch.allclose(got.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPE_PARAMS
def test_a_products_rows_do_not_depend_on_their_number(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = PackedLinear(torch.randn(100, 80).to(dtype))
    x = torch.randn(200, 80).to(dtype)
    whole = linear(x)
    for count in (*range(1, 30), 63, 64, 129):
        assert torch.equal(linear(x[:count]), whole[:count])
        assert torch.equal(linear(x[7 : 7 + count]), whole[7 : 7 + count])


@DTYPE_PARAMS
def test_a_product_of_no_rows_is_empty(dtype: torch.dtype) -> None:
    assert PackedLinear(torch.randn(40, 16).to(dtype))(torch.empty(0, 16, dtype=dtype)).shape == (0, 40)


@DTYPE_PARAMS
def test_argmax_is_the_lowest_of_the_largest(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    logits = torch.randint(-5, 5, (4, 20_000)).to(dtype)
    assert argmax(logits) == [int((row == row.max()).nonzero()[0]) for row in logits]
    logits[2, 3] = float("nan")
    assert argmax(logits)[2] == int((logits[2] == 4).nonzero()[0])


@dataclass
class Paged:
    """Keys and values of several sequences in shuffled blocks, and the dense truth beside them."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    k_blocks: torch.Tensor
    v_blocks: torch.Tensor
    tables: list[list[int]]


def paged(lengths: list[int], kv_heads: int, dim: int, dtype: torch.dtype, garbage: float = 0.0) -> Paged:
    counts = [-(-length // BLOCK_SLOTS) for length in lengths]
    order = torch.randperm(sum(counts) + 3).tolist()
    k_blocks = torch.full((len(order), kv_heads, dim, BLOCK_SLOTS), garbage, dtype=dtype)
    v_blocks = torch.full((len(order), kv_heads, BLOCK_SLOTS, dim), garbage, dtype=dtype)
    keys, values, tables = [], [], []
    for length, count in zip(lengths, counts, strict=True):
        table, order = order[:count], order[count:]
        keys.append(torch.randn(length, kv_heads, dim).to(dtype))
        values.append(torch.randn(length, kv_heads, dim).to(dtype))
        for place in range(length):
            block, lane = table[place // BLOCK_SLOTS], place % BLOCK_SLOTS
            k_blocks[block, :, :, lane] = keys[-1][place]
            v_blocks[block, :, lane, :] = values[-1][place]
        tables.append(table)
    return Paged(keys, values, k_blocks, v_blocks, tables)


def attend(
    pages: Paged,
    queries: list[torch.Tensor],
    firsts: list[int],
    window: int = 0,
    softcap: float = 0.0,
    trees: dict[int, tuple[int, ...]] | None = None,
) -> list[torch.Tensor]:
    """Return the attention of every sequence's queries; `trees` are the parents of those sequences that are one."""
    """Return the kernel's output for each sequence; `queries` [rows, heads, dim] start at position `firsts`."""
    native = library()
    assert native is not None
    q = torch.cat(queries).contiguous()
    heads, dim = q.shape[1:]
    out = torch.empty_like(q)
    blocks = torch.tensor([block for table in pages.tables for block in table])
    block_starts = torch.tensor([0, *[len(table) for table in pages.tables]]).cumsum(0)
    row_starts = torch.tensor([0, *[len(query) for query in queries]]).cumsum(0)
    positions = torch.tensor(firsts)
    starts, slots = [0], []
    for index, query in enumerate(queries):
        table, parents = pages.tables[index], (trees or {}).get(index)
        for path in paths(parents) if parents is not None else [()] * len(query):
            places = [firsts[index] + node for node in path]
            slots.extend(table[place // BLOCK_SLOTS] * BLOCK_SLOTS + place % BLOCK_SLOTS for place in places)
            starts.append(len(slots))
    path_starts, path_slots = torch.tensor(starts), torch.tensor(slots, dtype=torch.int64)
    native.specserve_attend(
        DTYPES[q.dtype], q.data_ptr(), pages.k_blocks.data_ptr(), pages.v_blocks.data_ptr(), out.data_ptr(),
        blocks.data_ptr(), block_starts.data_ptr(), row_starts.data_ptr(), positions.data_ptr(),
        None if trees is None else path_starts.data_ptr(), path_slots.data_ptr(), len(queries), heads,
        pages.k_blocks.shape[1], dim, window, ctypes.c_double(dim**-0.5), ctypes.c_double(softcap),
    )  # fmt: skip
    return list(out.split([len(query) for query in queries]))


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int, window: int, softcap: float
) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.double().repeat_interleave(group, 1), value.double().repeat_interleave(group, 1)
    scores = torch.einsum("rhd,khd->hrk", query.double(), key) * query.shape[-1] ** -0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    positions = torch.arange(first, first + len(query))[:, None]
    places = torch.arange(len(key))[None]
    seen = (places <= positions) & ((places > positions - window) if window else torch.ones(1, dtype=torch.bool))
    return torch.einsum("hrk,khd->rhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)


@DTYPE_PARAMS
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (40, 0.0), (300, 0.0), (0, 20.0), (17, 30.0)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 1, 32), (4, 2, 16), (3, 3, 48)])
def test_attention_is_right(
    dtype: torch.dtype, window: int, softcap: float, heads: int, kv_heads: int, dim: int
) -> None:
    torch.manual_seed(2)
    lengths, rows = [1, 16, 17, 255, 256, 257, 600], [1, 16, 5, 255, 3, 2, 70]
    pages = paged(lengths, kv_heads, dim, dtype)
    queries = [torch.randn(count, heads, dim).to(dtype) for count in rows]
    firsts = [length - count for length, count in zip(lengths, rows, strict=True)]
    got = attend(pages, queries, firsts, window, softcap)
    for index, query in enumerate(queries):
        expected = dense(query, pages.keys[index], pages.values[index], firsts[index], window, softcap)
        assert torch.allclose(got[index].double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPE_PARAMS
@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 700), rows=st.integers(1, 24), window=st.sampled_from([0, 30, 512]), split=st.integers(1, 9)
)
def test_an_attention_row_does_not_depend_on_its_company(
    dtype: torch.dtype, length: int, rows: int, window: int, split: int
) -> None:
    torch.manual_seed(length)
    rows = min(rows, length)
    pages = paged([length, 40], 2, 16, dtype, garbage=3.0)
    query, other = torch.randn(rows, 4, 16).to(dtype), torch.randn(9, 4, 16).to(dtype)
    first = length - rows
    alone, _ = attend(pages, [query, other], [first, 31], window)
    parts = []
    for start in range(0, rows, split):
        part, _ = attend(pages, [query[start : start + split], other[:1]], [first + start, 31], window)
        parts.append(part)
    assert torch.equal(torch.cat(parts), alone)


@DTYPE_PARAMS
@settings(max_examples=40, deadline=None)
@given(
    first=st.integers(0, 530),
    choices=st.lists(st.integers(0, 1_000), min_size=1, max_size=24),
    window=st.sampled_from([0, 5, 30, 270]),
    softcap=st.sampled_from([0.0, 20.0]),
)
def test_a_node_of_a_tree_attends_as_the_last_of_its_chain(
    dtype: torch.dtype, first: int, choices: list[int], window: int, softcap: float
) -> None:
    """The tree has company that is a chain; where its nodes lie, and across how many chunks, changes no bit."""
    torch.manual_seed(first)
    parents = tuple(choice % (node + 1) for node, choice in enumerate(choices))
    pages = paged([first + len(parents) + 1, 40], 2, 16, dtype, garbage=3.0)
    query, other = torch.randn(len(parents) + 1, 4, 16).to(dtype), torch.randn(9, 4, 16).to(dtype)
    tree, company = attend(pages, [query, other], [first, 31], window, softcap, {0: parents})
    alone = attend(pages, [query[:1], other], [first, 31], window, softcap)
    assert torch.equal(company, alone[1])
    for path in paths(parents)[:: max(1, len(parents) // 4)]:
        node = path[-1]
        rows = [*range(first), *(first + other for other in path)]
        chain = paged([len(rows), 40], 2, 16, dtype, garbage=3.0)
        for place, row in enumerate(rows):
            block, lane = chain.tables[0][place // BLOCK_SLOTS], place % BLOCK_SLOTS
            chain.k_blocks[block, :, :, lane] = pages.keys[0][row]
            chain.v_blocks[block, :, lane, :] = pages.values[0][row]
        expected, _ = attend(chain, [query[list(path)], other], [first, 31], window, softcap)
        assert torch.equal(tree[node], expected[-1])


@DTYPE_PARAMS
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    pages = paged([900, 300], 2, 32, dtype)
    queries = [torch.randn(6, 4, 32).to(dtype), torch.randn(200, 4, 32).to(dtype)]
    linear, x = PackedLinear(torch.randn(500, 300).to(dtype)), torch.randn(40, 300).to(dtype)
    seen = []
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        seen.append((torch.cat(attend(pages, queries, [894, 100])), linear(x)))
    torch.set_num_threads(before)
    assert all(torch.equal(a, seen[0][0]) and torch.equal(p, seen[0][1]) for a, p in seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_gumbel_max_is_the_argmax_of_the_noise_laid_out_whole(dtype: torch.dtype, spread: float) -> None:
    torch.manual_seed(5)
    scores = (torch.randn(40, 40_000) * spread).to(dtype)
    scores[3, 100:] = float("-inf")
    scores[4] = float("-inf")
    scores[4, 777] = -3.0
    seeds, positions = list(range(40)), list(range(100, 140))
    assert gumbel_max(scores, seeds, positions) == coupled_tokens(scores, gumbel_rows(seeds, positions, 40_000))
