"""The heads shipped with the embedded target: small, trained, offered by name, and never a change of the text."""

import json

import pytest

from specserve.deployments.llm import LLM
from specserve.deployments.settings import ServiceSettings
from specserve.service.messages import AttachedName
from specserve.service.models import embedded_dir

SHIPPED: tuple[AttachedName, ...] = ("eagle3", "medusa", "mtp")
PROMPTS = ["def add(a, b):", "class Point:\n", "import os\n\nfor name in os.listdir("]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_head_is_small_and_says_what_its_training_gave(name: AttachedName) -> None:
    assert sum(file.stat().st_size for file in embedded_dir(name).glob("*.safetensors")) < 6_000_000
    trained = json.loads((embedded_dir(name) / "config.json").read_text())["specserve_training"]
    assert trained["held_out_matches"][0] > 0.2


def test_each_drafts_by_name_alone_what_is_accepted_and_the_text_is_plain_decodings() -> None:
    settings = ServiceSettings(placement="inline", proposers=SHIPPED, dtype="float32", num_pages=256)
    assert set(settings.attached_folders) == set(SHIPPED)
    with LLM(settings=settings) as llm:
        plain = llm.generate(PROMPTS, max_tokens=32, mode="off")
        for name in SHIPPED:
            drafted = llm.generate(PROMPTS, max_tokens=32, mode="on", proposer=name, max_draft_tokens=3)
            assert [one.text for one in drafted] == [one.text for one in plain]
            assert {one.summary.proposer for one in drafted} == {name}
            assert sum(one.summary.num_accepted_tokens for one in drafted) > 5
