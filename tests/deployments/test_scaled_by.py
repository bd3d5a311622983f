"""What replicas say of themselves to be scaled by, and links that keep a replica up only while it is wanted."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import pytest
from support.cells import FixedPlanner
from support.rounds import TokenRounds, token_engine

from specserve.deployments import remote
from specserve.deployments.cellreport import cell_report
from specserve.deployments.hosts import Address, ProposerHost
from specserve.deployments.memory import Memory
from specserve.deployments.pace import Pace
from specserve.deployments.planning import PolicyPlanner
from specserve.deployments.remote import ProposerLink, RemoteProposerPort
from specserve.policies.document import simple_policy
from specserve.policies.scaling import Bounds, ProposerLoad, proposers_wanted
from specserve.service.messages import ProposeBatch, ProposeRow, Sampling
from specserve.service.ports import RequestView
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


def test_pages_that_run_short_take_an_idle_proposers_replica_down_and_bring_it_back_when_they_are_free_again() -> None:
    """A script of seconds: the pool fills, a request is preempted; then it empties. Requests come all the time."""
    engine = token_engine(TokenRounds(16, 4), FixedPlanner(None, 0))
    clock = [0.0]
    memory = Memory(engine, lambda: clock[0])
    planner = PolicyPlanner(simple_policy("fixed:2"))
    planner.watch_demand("draft", 300.0)
    views, replicas, seen = [RequestView("r", "default", "auto", None, None, 20, 500)], 1, list[int]()
    for second in range(400):
        clock[0] = float(second)
        engine.counters.preempted += 100 <= second < 110
        reachable = frozenset({"draft"} if second < 50 and replicas else ())
        planner.plan(views, reachable, clock[0])
        assert cell_report(engine, memory)["memory_short"] == (100 <= second < 139)
        wanted = planner.wants("draft", replicas > 0, clock[0], memory.short())
        load = ProposerLoad(wanted, 0.0, int(wanted), clock[0])
        replicas = proposers_wanted(load, replicas, clock[0], Bounds(0, 1))
        seen.append(replicas)
    assert [count for count, _ in groupby(seen)] == [1, 0, 1]
    assert seen[99:101] == [1, 0]
    assert seen.index(0) + 60 <= len(seen) - seen[::-1].index(0) < 400
