"""`specserve generate`: one completion, with the policy's proposer or the one that is asked for."""

import pytest

from specserve.cli import main

PROMPT = ["generate", "--prompt", "def add(first, second):", "--max-tokens", "12"]


@pytest.mark.parametrize("proposer", [None, "prompt_lookup", "suffix", "draft"])
def test_a_completion_is_printed_whoever_drafts(proposer: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PROMPT, "--policy", "fixed:4", *([] if proposer is None else ["--proposer", proposer])]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip()
    assert "12 tokens" in shown.err
    used = shown.err.strip().rpartition("proposer ")[2]
    assert used in ({"prompt_lookup", "draft", "None"} if proposer is None else {proposer, "None"})


def test_a_proposer_that_does_not_exist_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PROMPT, "--proposer", "oracle"]) == 2
    assert "proposers" in capsys.readouterr().err
