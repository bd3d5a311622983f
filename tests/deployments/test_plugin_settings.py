"""Plug-ins in the settings: by import path, made for the cell, never under another proposer's name."""

import pytest

from specserve.deployments.cell import local_proposer_ports
from specserve.deployments.settings import ServiceSettings, load_settings
from specserve.service.errors import BadRequestError
from specserve.service.plugins import PluginPort

LOOKUP = "specserve.service.proposers.prompt_lookup:PromptLookupProposer"


def test_a_plug_in_is_made_and_one_that_takes_a_name_is_refused() -> None:
    ports = local_proposer_ports(ServiceSettings(proposers=("prompt_lookup", "support.plugin:Repeating")))
    assert isinstance(ports["repeating"], PluginPort)
    with pytest.raises(BadRequestError, match="'prompt_lookup'"):
        local_proposer_ports(ServiceSettings(proposers=(LOOKUP,)))


def test_what_is_neither_a_proposer_nor_a_path_is_refused() -> None:
    for bad in ("oracle", "a b:C", ":C", "m:"):
        with pytest.raises(BadRequestError, match="proposers"):
            load_settings(None, {"proposers": (bad,)})
