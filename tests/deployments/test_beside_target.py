"""Proposers beside the embedded target: asked for by a setting, in one process and over the target's channel."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.channelled import SECRET, at

from specserve.cli import parser
from specserve.deployments.cell import target_and_attached
from specserve.deployments.hosts import TargetHost
from specserve.deployments.llm import LLM
from specserve.deployments.remote import ProposerLink, RemoteProposerPort
from specserve.deployments.serve import settings_from
from specserve.deployments.settings import BESIDE_TARGET, ServiceSettings
from specserve.service.errors import ModelUnsupportedError, ProposerUnavailableError
from specserve.service.messages import ProposeBatch, ProposeRow, Sampling, ScoreBatch, ScoreRow
from specserve.service.models import load_model
from specserve.service.proposers.eagle3 import Eagle3Config, Eagle3Head, save_eagle3

PROMPTS = ["def add(a, b):", "class Point:\n", "import os\n\nfor name in os.listdir("]
NAMES = ("eagle3", "layer_skip", "early_exit")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, object]:
    """Settings for all three; the head is untrained, and its embeddings make it guess some tokens right."""
    folder: Path = tmp_path_factory.mktemp("head")
    torch.manual_seed(0)
    save_eagle3(Eagle3Head(Eagle3Config(384, 384, 6, 2, 64, 512, 1000, 4096, (2, 4, 5))), folder, {})
    return {"eagle3": str(folder), "layer_skip": (3, 5), "early_exit": 6, "placement": "inline", "num_pages": 256}


def test_the_text_is_plain_decodings_and_the_summary_names_the_proposer(asked: Mapping[str, object]) -> None:
    with LLM(settings=ServiceSettings.model_validate(asked)) as llm:
        plain = llm.generate(PROMPTS, max_tokens=24, mode="off")
        for name in NAMES:
            drafted = llm.generate(PROMPTS, max_tokens=24, mode="on", proposer=name, max_draft_tokens=4)
            assert [one.text for one in drafted] == [one.text for one in plain]
            assert {one.summary.proposer for one in drafted} == {name}
            assert all(one.summary.num_draft_tokens > 0 for one in drafted)


def test_what_no_setting_asks_for_is_not_there(asked: Mapping[str, object]) -> None:
    assert set(NAMES) <= set(ServiceSettings.model_validate(asked).usable_proposers)
    assert set(BESIDE_TARGET).isdisjoint(ServiceSettings().usable_proposers)


def test_the_command_line_takes_layers_or_a_file() -> None:
    numbers = settings_from(parser().parse_args(["serve", "--layer-skip", "3,5", "--early-exit", "2"]))
    assert (numbers.layer_skip, numbers.early_exit) == ((3, 5), 2)
    named = settings_from(parser().parse_args(["serve", "--layer-skip", "found.json"]))
    assert named.pinned().layer_skip == str(Path("found.json").absolute())


def test_a_head_for_another_target_is_refused_before_anything_serves(tmp_path: Path) -> None:
    save_eagle3(Eagle3Head(Eagle3Config(384, 384, 6, 2, 64, 512, 1000, 5000, (2, 4, 5))), tmp_path, {})
    with pytest.raises(ModelUnsupportedError, match="made for 5000 tokens; this target has 4096"):
        LLM(settings=ServiceSettings(placement="inline", eagle3=str(tmp_path), num_pages=64))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"layer_skip": (8,)}, "layers 0 to 7"),
        ({"early_exit": 8}, "1 to 7"),
        ({"layer_skip": "none.json"}, "none.json"),
    ],
    ids=str,
)
def test_layers_that_the_target_lacks_are_refused_before_anything_serves(setting: dict[str, object], said: str) -> None:
    with pytest.raises(ModelUnsupportedError, match=said):
        LLM(settings=ServiceSettings.model_validate({"placement": "inline", "num_pages": 64, **setting}))


def test_all_draft_over_the_targets_channel_while_it_is_there(asked: Mapping[str, object]) -> None:
    settings = ServiceSettings.model_validate(asked)
    target, attached = target_and_attached(settings, load_model(settings.model_source, torch.float32))
    tokens, table = tuple(range(40, 60)), (3, 1)

    async def main() -> None:
        with ThreadPoolExecutor(1) as executor:
            host = TargetHost(target, SECRET, executor, attached)
            link = ProposerLink(at(await host.server.start()), SECRET)
            link.start()
            await asyncio.wait_for(link.wait_connected(), 10)
            ports = [RemoteProposerPort(name, link, needs_pages=True) for name in NAMES]
            await asyncio.get_running_loop().run_in_executor(
                executor, target.score, ScoreBatch(0, (ScoreRow("a", 0, tokens[:-1], 0, table),))
            )
            row = ProposeRow("a", 20, 0, tokens, 3, Sampling(), block_table=table)
            for port in ports:
                (draft,) = (await port.propose(ProposeBatch(1, port.name, (row,)), 10.0)).drafts
                assert len(draft.token_ids) == 3
            await link.close()
            await host.server.stop()
            for port in ports:
                with pytest.raises(ProposerUnavailableError):
                    await port.propose(ProposeBatch(2, port.name, (row,)), 1.0)

    asyncio.run(main())
