"""The embedded target drafting for itself: asked for by a setting, in one process and over the target's channel."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from specserve.cli import parser
from specserve.deployments.cell import target_and_attached
from specserve.deployments.hosts import TargetHost
from specserve.deployments.llm import LLM
from specserve.deployments.remote import ProposerLink, RemoteProposerPort
from specserve.deployments.serve import settings_from
from specserve.deployments.settings import ServiceSettings
from specserve.service.errors import ModelUnsupportedError
from specserve.service.messages import ProposeBatch, ProposeRow, Sampling, ScoreBatch, ScoreRow
from specserve.service.models import load_model

SECRET = b"a secret of this test"
PROMPTS = ["def add(a, b):", "class Point:\n", "import os\n\nfor name in os.listdir("]


def test_the_text_is_plain_decodings_and_the_summary_names_the_proposer() -> None:
    settings = ServiceSettings(placement="inline", layer_skip=(3, 5), early_exit=6, num_pages=256)
    with LLM(settings=settings) as llm:
        plain = llm.generate(PROMPTS, max_tokens=24, mode="off")
        for name in ("layer_skip", "early_exit"):
            drafted = llm.generate(PROMPTS, max_tokens=24, mode="on", proposer=name, max_draft_tokens=4)
            assert [one.text for one in drafted] == [one.text for one in plain]
            assert {one.summary.proposer for one in drafted} == {name}
            assert all(one.summary.num_draft_tokens > 0 for one in drafted)


def test_without_layers_named_there_are_no_such_proposers() -> None:
    assert {"layer_skip", "early_exit"}.isdisjoint(ServiceSettings().usable_proposers)


def test_the_command_line_takes_layers_or_a_file() -> None:
    numbers = settings_from(parser().parse_args(["serve", "--layer-skip", "3,5", "--early-exit", "2"]))
    assert (numbers.layer_skip, numbers.early_exit) == ((3, 5), 2)
    named = settings_from(parser().parse_args(["serve", "--layer-skip", "found.json"]))
    assert named.pinned().layer_skip == str(Path("found.json").absolute())


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


def test_both_draft_over_the_targets_channel() -> None:
    settings = ServiceSettings(layer_skip=(3, 5), early_exit=6, num_pages=64)
    target, attached = target_and_attached(settings, load_model(settings.model_source, torch.float32))
    tokens, table = tuple(range(40, 60)), (3, 1)

    async def main() -> None:
        with ThreadPoolExecutor(1) as executor:
            host = TargetHost(target, SECRET, executor, attached)
            address = await host.server.start()

            async def locate() -> tuple[str, int]:
                return address

            link = ProposerLink(locate, SECRET)
            link.start()
            await asyncio.wait_for(link.wait_connected(), 10)
            await asyncio.get_running_loop().run_in_executor(
                executor, target.score, ScoreBatch(0, (ScoreRow("a", 0, tokens[:-1], 0, table),))
            )
            row = ProposeRow("a", 20, 0, tokens, 3, Sampling(), block_table=table)
            for name in ("layer_skip", "early_exit"):
                port = RemoteProposerPort(name, link, needs_pages=True)
                (draft,) = (await port.propose(ProposeBatch(1, name, (row,)), 10.0)).drafts
                assert len(draft.token_ids) == 3
            await link.close()
            await host.server.stop()

    asyncio.run(main())
