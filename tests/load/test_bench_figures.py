"""The arithmetic of the bench, the budgets it holds adaptive to, and the doubts it raises about its own figures."""

import math
import random
from dataclasses import replace
from statistics import median, stdev
from typing import Any

import pytest

from specserve.load.budgets import doubts, missed
from specserve.load.cells import Cell, RivalCell, cells_of, check_same_prompts
from specserve.load.errors import LoadError
from specserve.load.figures import (
    Figures,
    Pass,
    Ratios,
    Sample,
    figures,
    medians,
    num_differing,
    percentile,
    ratio_error,
    ratios,
)


def _pass(num_tokens: int, *texts: str, wall_s: float = 1.0) -> Pass:
    each = num_tokens // max(1, len(texts))
    return Pass(tuple(Sample((0.1, 0.2), 0.2, each, 0, 0, 5, 0, text) for text in texts or ("",)), wall_s)


FIGURES: Figures = figures(_pass(10))


def _cell(mode: str, ratios: Ratios, differing: int | None = 0, **changed: Any) -> Cell:
    return Cell("mixed", 4, mode, replace(FIGURES, **changed), ratios, 8, differing)


def test_percentile_interpolates_and_knows_nothing_of_nothing() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 1.0], 0.95) == pytest.approx(0.95)
    assert percentile([7.0], 0.95) == 7.0
    assert percentile([], 0.5) is None


def test_figures_of_a_pass_follow_from_its_samples() -> None:
    samples = (Sample((0.1, 0.2, 0.4), 0.5, 7, 4, 6, 0, 3), Sample((0.3, 0.5), 0.7, 3, 1, 4))
    found = figures(Pass(samples, 2.0, client_cpu_s=0.5, rss_mb=7.0, others_cpu_share=0.2))
    assert found.tokens_per_s == 5.0
    assert found.tokens_per_round == 10 / 5
    assert found.ttft_ms_p50 == pytest.approx(200.0)
    assert found.itl_ms_p50 == pytest.approx(200.0)
    assert found.tpot_ms_p50 == pytest.approx((300 / 6 + 200 / 2) / 2)
    assert found.e2e_ms_p50 == pytest.approx(600.0)
    assert found.goodput_rps == 1.0
    assert (found.num_drafted, found.num_accepted, found.draft_efficiency) == (10, 5, 0.5)
    assert (found.cached_prompt_tokens, found.client_cpu_share, found.rss_mb) == (3, 0.25, 7.0)
    assert found.others_cpu_share == 0.2


def test_what_the_server_does_not_say_stays_unknown() -> None:
    found = figures(Pass((Sample((), 0.2, 0, None),), 1.0))
    assert (found.tokens_per_round, found.tpot_ms_p50, found.num_accepted, found.draft_efficiency) == (None,) * 4


def test_medians_are_taken_figure_by_figure_where_known() -> None:
    passes = [replace(figures(_pass(tokens)), rss_mb=rss) for tokens, rss in ((10, None), (90, 3.0), (20, None))]
    assert (medians(passes).tokens_per_s, medians(passes).rss_mb, medians(passes).draft_efficiency) == (20, 3.0, None)


def test_ratios_compare_with_plain_and_the_best_fixed() -> None:
    found = ratios({"plain": [10], "fixed:2": [15], "fixed:4": [19, 20, 99], "adaptive": [18]})
    assert found["adaptive"] == Ratios(1.8, 0.9)
    assert ratios({"adaptive": [5]})["adaptive"] == Ratios(None, None)


def test_the_error_of_a_ratio_is_what_the_repeats_do_not_share() -> None:
    assert ratio_error([9.0, 90.0, 0.9], [10.0, 100.0, 1.0]) == pytest.approx(0.0, abs=1e-12)
    assert ratio_error([1.0, 1.1], [1.0, 1.0]) is None
    rng = random.Random(5)
    drawn = [[[math.exp(rng.gauss(0.0, 0.1)) for _ in range(9)] for _ in range(2)] for _ in range(400)]
    errors = [ratio_error(ours, theirs) or 0.0 for ours, theirs in drawn]
    assert sum(errors) / 400 == pytest.approx(stdev(median(ours) / median(theirs) for ours, theirs in drawn), rel=0.15)


def test_plain_is_compared_with_their_plain_and_speculation_with_their_best() -> None:
    found = ratios({"plain": [10], "adaptive": [30]}, {"plain": [5], "prompt_lookup": [20]})
    assert found["plain"].to_transformers == 2
    assert found["adaptive"].to_transformers == 1.5
    assert ratios({"adaptive": [30]}, {"plain": [5]})["adaptive"].to_transformers == 6


def test_a_prompt_differs_when_any_repeat_has_another_text() -> None:
    plain = [_pass(9, "a", "b", "c"), _pass(9, "a", "b", "c")]
    adaptive = [_pass(9, "a", "X", "c"), _pass(9, "a", "Y", "Z")]
    assert num_differing(adaptive, plain[0]) == 2
    cells, _ = cells_of("mixed", 1, {"plain": plain, "adaptive": adaptive}, greedy=True)
    assert [cell.differing for cell in cells] == [0, 2]


def test_plain_itself_must_repeat_its_text() -> None:
    cells, _ = cells_of("mixed", 1, {"plain": [_pass(9, "a"), _pass(9, "b")]}, greedy=True)
    assert cells[0].differing == 1


def test_texts_are_not_compared_when_sampling_or_without_plain() -> None:
    passes = {"plain": [_pass(9, "a")], "adaptive": [_pass(9, "b")]}
    assert [cell.differing for cell in cells_of("mixed", 1, passes, greedy=False)[0]] == [None, None]
    assert cells_of("mixed", 1, {"adaptive": passes["adaptive"]}, greedy=True)[0][0].differing is None


def test_transformers_passes_become_cells_of_their_own() -> None:
    passes = {"plain": [_pass(30)], "transformers:plain": [_pass(10), _pass(20), _pass(15)]}
    cells, rivals = cells_of("mixed", 4, passes, greedy=True)
    assert rivals == [RivalCell("mixed", 4, "plain", 15)]
    assert cells[0].ratios.to_transformers == 2


def test_prompts_of_other_lengths_are_not_compared() -> None:
    other = Pass((Sample((), 1.0, 9, None, num_prompt_tokens=6),), 1.0)
    check_same_prompts({"plain": [_pass(9, "a")], "adaptive": [_pass(9, "b")]})
    with pytest.raises(LoadError, match="transformers:plain"):
        check_same_prompts({"plain": [_pass(9, "a")], "transformers:plain": [other]})


def test_each_missed_budget_is_one_sentence() -> None:
    good = _cell("adaptive", Ratios(0.98, 0.95))
    assert missed([good, _cell("fixed:4", Ratios(0.5, 1.0))]) == []
    slow = missed([_cell("adaptive", Ratios(0.979, 0.949))])
    assert [("plain" in slow[0], "fixed" in slow[1]), len(slow)] == [(True, True), 2]
    assert missed([good, _cell("fixed:8", Ratios(2.0, 1.0), differing=3)]) == [
        "fixed:8 differs from plain's text in 3 of 8 requests on mixed at concurrency 4; the budget is 0."
    ]


def test_a_budget_is_missed_when_the_repeats_leave_no_doubt_and_a_doubt_is_named() -> None:
    close, clear = Ratios(1.0, 0.93, None, 0.1, 0.011), Ratios(1.0, 0.93, None, 0.1, 0.009)
    assert missed([_cell("adaptive", close)]) == []
    assert "0.930 ± 0.011 of the best fixed gamma" in missed([_cell("adaptive", close)], strict=True)[0]
    assert "takes more repeats" in doubts([_cell("adaptive", close)], [])[0]
    assert "0.930 ± 0.009 of the best fixed gamma" in missed([_cell("adaptive", clear)])[0]
    assert doubts([_cell("adaptive", clear), _cell("fixed:4", close)], []) == []


def test_check_also_names_what_could_not_be_checked() -> None:
    assert missed([_cell("adaptive", Ratios(1.0, None), None)]) == []
    assert len(missed([_cell("adaptive", Ratios(1.0, None), None)], strict=True)) == 2
    assert len(missed([_cell("plain", Ratios(1.0))], strict=True)) == 1
    assert missed([_cell("plain", Ratios(1.0)), _cell("adaptive", Ratios(1.0, 1.0))], strict=True) == []


def test_figures_are_doubted_when_the_machine_was_busy_or_prompts_were_cached() -> None:
    assert doubts([_cell("plain", Ratios())], [RivalCell("mixed", 1, "plain", 5.0, 0.1)]) == []
    assert "1.20 cores" in doubts([_cell("plain", Ratios())], [RivalCell("mixed", 1, "plain", 5.0, 1.2)])[0]
    assert "prefix cache" in doubts([_cell("plain", Ratios(), cached_prompt_tokens=64)], [])[0]
    assert "load generator" in doubts([_cell("plain", Ratios(), client_cpu_share=0.5)], [])[0]
