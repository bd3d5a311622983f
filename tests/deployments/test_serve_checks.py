"""What `specserve serve` refuses before it starts anything: one sentence, and nothing left running."""

import socket

import pytest

from specserve.cli import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "fixed:x"], "fixed"),
        (["--policy", "no-such-file.yaml"], "no-such-file.yaml"),
        (["no-such-model"], "no-such-model"),
        (["--draft", "no-such-draft"], "no-such-draft"),
        (["--proposers", "oracle"], "oracle"),
        (["--host", "0.0.0.0"], "0.0.0.0"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_an_exit_code(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert str(port) in capsys.readouterr().err
