"""What `specserve serve` refuses before it starts anything: one sentence, and nothing left running."""

import re
import socket
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig

from specserve.cli import main, parser
from specserve.deployments.api.limits import RequestLimits
from specserve.deployments.credentials import key_hash
from specserve.deployments.serve import settings_from
from specserve.deployments.settings import ServiceSettings
from specserve.service.errors import BadRequestError


def settings(*arguments: str) -> ServiceSettings:
    return settings_from(parser().parse_args(["serve", *arguments]))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the sentence that `specserve serve` ends with."""
    assert main(["serve", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "fixed:x"], "fixed"),
        (["--policy", "no-such-file.yaml"], "no-such-file.yaml"),
        (["no-such-model"], "no-such-model"),
        (["no-such-model.gguf"], "no-such-model.gguf"),
        (["--draft", "no-such-draft"], "no-such-draft"),
        (["--proposers", "oracle"], "oracle"),
        (["--host", "0.0.0.0"], "0.0.0.0"),
        (["--port", "70000"], "port"),
        (["--config", "no-such-file.yaml"], "no-such-file.yaml"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_an_exit_code(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 8001\n", "prot is no setting"),
        ("port: high\n", "port"),
        ("port: 70000\n", "70000"),
        ("- port\n", "holds no settings"),
        ("port: [\n", "is no YAML"),
    ],
)
def test_a_wrong_line_in_the_settings_file_is_named_with_the_file(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    said = refusal(capsys, "--config", str(file))
    assert words in said
    assert str(file) in said


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("port: 9000\npolicy: fixed:3\nproposers: [prompt_lookup]\nmax_running: 4\n")
    got = settings("--config", str(file), "--port", "9001", "--threads", "1", "--prefill-tokens", "64")
    assert got == ServiceSettings(
        port=9001, policy="fixed:3", proposers=("prompt_lookup",), max_running=4, num_threads=1, prefill_tokens=64
    )


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").touch()
    assert settings("--config", str(tmp_path / "settings.yaml")) == ServiceSettings()


def test_help_states_the_settings_own_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert settings() == ServiceSettings()
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    stated = dict(re.findall(r"--([a-z-]+) (?:(?!--)[^()])*\(default: ([^)]*)\)", text[text.index("options:") :]))
    for flag, default in stated.items():
        value = getattr(ServiceSettings(), {"threads": "num_threads"}.get(flag, flag.replace("-", "_")))
        if value is not None:
            assert default == (",".join(value) if isinstance(value, tuple) else str(value)), flag
    assert {"port", "num-pages", "page-tokens", "max-running", "prefill-tokens", "threads"} <= set(stated)


def test_a_model_that_is_not_served_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    AutoConfig.for_model("mamba").save_pretrained(tmp_path)
    assert "mamba" in refusal(capsys, str(tmp_path), "--port", "0")
    assert "mamba" in refusal(capsys, "--draft", str(tmp_path), "--port", "0")


def test_other_processes_get_the_model_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    pinned = settings("model", "--draft", "./model").pinned()
    assert (pinned.model, pinned.draft) == (str(tmp_path / "model"),) * 2
    assert pinned.model_id == "model"


def test_a_host_that_strangers_reach_needs_keys_of_both_kinds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, admin = tmp_path / "keys.yaml", tmp_path / "admin"
    keys.write_text(yaml.safe_dump({"keys": [{"id": "a", "sha256": key_hash("a key")}]}))
    admin.write_text("an admin key of this test")
    # 127.0.0.2 is no host of the list, and yet reached by nobody.
    host = ["--host", "127.0.0.2", "--port", "0"]
    monkeypatch.delenv("SPECSERVE_ADMIN_KEY", raising=False)
    assert "no API keys" in refusal(capsys, *host, "--admin-key-file", str(admin))
    assert "no admin key" in refusal(capsys, *host, "--api-keys", str(keys))
    assert "no-such-model" in refusal(
        capsys, "no-such-model", *host, "--api-keys", str(keys), "--admin-key-file", str(admin)
    )
    monkeypatch.setenv("SPECSERVE_ADMIN_KEY", "another of the environment")
    assert "no-such-model" in refusal(capsys, "no-such-model", *host, "--api-keys", str(keys))


def test_keys_that_cannot_be_used_are_refused_at_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys, admin = tmp_path / "keys.yaml", tmp_path / "admin"
    keys.write_text("keys: [{id: a, sha256: sk-secret}]")
    admin.write_text("short")
    assert "keys.0.sha256" in (said := refusal(capsys, "--api-keys", str(keys)))
    assert "sk-secret" not in said
    assert "characters" in refusal(capsys, "--admin-key-file", str(admin))


def test_a_limit_is_a_setting_and_a_misspelled_one_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("limits: {max_waiting: 7, max_body_bytes: 4096}\n")
    assert settings("--config", str(file)).limits == RequestLimits(max_waiting=7, max_body_bytes=4096)
    file.write_text("limits: {max_wating: 7}\n")
    said = refusal(capsys, "--config", str(file))
    assert "limits.max_wating is no setting" in said
    assert "max_waiting" in said


def test_other_processes_get_the_keys_by_their_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pinned = settings("--api-keys", "keys.yaml", "--admin-key-file", "admin").pinned()
    assert (pinned.api_keys, pinned.admin_key_file) == (str(tmp_path / "keys.yaml"), str(tmp_path / "admin"))


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refusal(capsys, "--port", str(port))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--proposers", "draft,eagle"], "eagle of specserve-embedded needs --eagle DIR"),
        (["--proposers", "early_exit"], "early_exit of specserve-embedded needs --early-exit N"),
        (["--eagle3", "no-such-head"], "no-such-head/config.json"),
    ],
)
def test_a_proposer_that_is_named_and_cannot_be_built_is_told_what_it_needs(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(capsys, *arguments, "--port", "0")


def test_the_embedded_targets_own_heads_are_offered_by_name_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("target", "draft", "eagle3"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("specserve.deployments.settings.embedded_dir", lambda name: tmp_path / name)
    assert "eagle3" not in settings().usable_proposers
    named = settings("--proposers", "draft,eagle3")
    assert named.attached_folders == {"eagle3": tmp_path / "eagle3"}
    assert settings("--proposers", "eagle3", "--eagle3", "mine").attached_folders == {"eagle3": Path("mine")}
    assert ServiceSettings.model_validate(named.model_dump(mode="json")).usable_proposers == ("draft", "eagle3")
    assert "eagle3" not in ServiceSettings.model_validate(settings().model_dump(mode="json")).usable_proposers
    foreign = settings(str(tmp_path), "--proposers", "eagle3")
    with pytest.raises(BadRequestError, match="needs --eagle3 DIR"):
        foreign.usable_proposers  # noqa: B018  # it raises
