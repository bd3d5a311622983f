"""What replicas say of themselves to be scaled by, and links that keep a replica up only while it is wanted."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from specserve.deployments import remote
from specserve.deployments.hosts import Address, ProposerHost
from specserve.deployments.pace import Pace
from specserve.deployments.remote import ProposerLink, RemoteProposerPort
from specserve.service.messages import ProposeBatch, ProposeRow, Sampling
from specserve.service.proposers.prompt_lookup import PromptLookupProposer
from specserve.service.stats import EngineStats

SECRET = b"of this test"


def test_the_pace_is_that_of_the_tier_that_is_worst_off_since_it_was_asked_for() -> None:
    stats, objectives = EngineStats(), {"default": 100.0, "flex": None, "priority": 20.0}
    pace = Pace(stats, objectives.__getitem__)
    assert pace.over_objective() == 0.0
    stats.commit("default", 4, 0.8)
    stats.commit("priority", 1, 0.03)
    stats.commit("flex", 1, 9.0)
    assert pace.over_objective() == pytest.approx(2.0)
    stats.commit("priority", 1, 0.03)
    assert pace.over_objective() == pytest.approx(1.5)
    assert pace.over_objective() == 0.0


def test_a_link_asks_for_an_address_and_keeps_a_connection_only_while_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "WATCH_S", 0.001)

    async def main() -> None:
        asked, located, wish = asyncio.Event(), list[Address](), [False]
        with ThreadPoolExecutor(1) as executor:
            host = ProposerHost({"prompt_lookup": PromptLookupProposer()}, SECRET, executor)

            async def locate() -> Address:
                located.append(await host.server.start())
                return located[-1]

            def wanted() -> bool:
                asked.set()
                return wish[0]

            link = ProposerLink(locate, SECRET, wanted)
            port = RemoteProposerPort("prompt_lookup", link)
            link.start()
            await asked.wait()
            assert (link.connected, located) == (False, [])
            assert host.demand()["cells"] == 1.0  # whoever it was started for
            wish[0] = True
            await link.wait_connected()
            assert (len(located), host.demand()["cells"]) == (1, 1.0)
            row = ProposeRow("r", 4, 0, (5, 6, 5, 6), 2, Sampling())
            assert (await port.propose(ProposeBatch(1, port.name, (row,), ()), 30.0)).round == 1
            assert 0.0 < host.demand()["busy"] <= 1.0
            wish[0] = False
            while link.connected or host.demand()["cells"]:
                await asyncio.sleep(0)
            assert (port.available, len(located)) == (False, 1)
            await link.close()
            await host.server.stop()

    asyncio.run(asyncio.wait_for(main(), 60))
