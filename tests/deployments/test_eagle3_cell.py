"""A head beside the embedded target: named by a setting, drafting in one process and over the target's channel."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from specserve.deployments.cell import target_and_attached
from specserve.deployments.hosts import TargetHost
from specserve.deployments.llm import LLM
from specserve.deployments.remote import ProposerLink, RemoteProposerPort
from specserve.deployments.settings import ServiceSettings
from specserve.service.errors import ModelUnsupportedError, ProposerUnavailableError
from specserve.service.messages import ProposeBatch, ProposeRow, Sampling, ScoreBatch, ScoreRow
from specserve.service.models import load_model
from specserve.service.proposers.eagle3 import Eagle3Config, Eagle3Head, save_eagle3

SECRET = b"a secret of this test"
PROMPTS = ["def add(a, b):", "class Point:\n", "import os\n\nfor name in os.listdir("]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of an untrained head for the embedded target; its embeddings make it guess some tokens right."""
    folder: Path = tmp_path_factory.mktemp("head")
    torch.manual_seed(0)
    save_eagle3(Eagle3Head(Eagle3Config(384, 384, 6, 2, 64, 512, 1000, 4096, (2, 4, 5))), folder, {})
    return str(folder)


def test_the_text_is_plain_decodings_and_the_summary_names_the_head(head: str) -> None:
    settings = ServiceSettings(placement="inline", policy="adaptive", eagle3=head, num_pages=256)
    assert "eagle3" in settings.usable_proposers
    with LLM(settings=settings) as llm:
        plain = llm.generate(PROMPTS, max_tokens=24, mode="off")
        drafted = llm.generate(PROMPTS, max_tokens=24, mode="on", proposer="eagle3", max_draft_tokens=4)
    assert [one.text for one in drafted] == [one.text for one in plain]
    assert {one.summary.proposer for one in drafted} == {"eagle3"}
    assert all(one.summary.num_draft_tokens > 0 for one in drafted)


def test_without_a_head_there_is_no_such_proposer() -> None:
    assert "eagle3" not in ServiceSettings().usable_proposers


def test_a_head_for_another_target_is_refused_before_anything_serves(head: str, tmp_path: Path) -> None:
    save_eagle3(Eagle3Head(Eagle3Config(384, 384, 6, 2, 64, 512, 1000, 5000, (2, 4, 5))), tmp_path, {})
    with pytest.raises(ModelUnsupportedError, match="made for 5000 tokens; this target has 4096"):
        LLM(settings=ServiceSettings(placement="inline", eagle3=str(tmp_path), num_pages=64))


def test_the_head_drafts_over_the_targets_channel(head: str) -> None:
    settings = ServiceSettings(eagle3=head, num_pages=64)
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
            port = RemoteProposerPort("eagle3", link, needs_pages=True)
            await asyncio.get_running_loop().run_in_executor(
                executor, target.score, ScoreBatch(0, (ScoreRow("a", 0, tokens[:-1], 0, table),))
            )
            row = ProposeRow("a", 20, 0, tokens, 3, Sampling(), block_table=table)
            (draft,) = (await port.propose(ProposeBatch(1, "eagle3", (row,)), 10.0)).drafts
            assert len(draft.token_ids) == 3
            await link.close()
            await host.server.stop()
            with pytest.raises(ProposerUnavailableError):
                await port.propose(ProposeBatch(2, "eagle3", (row,)), 1.0)

    asyncio.run(main())
