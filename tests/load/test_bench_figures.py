"""The bench: its arithmetic, its reading of streams, and its client against a small fake server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from specserve.load.bench import Cell, Plan, measure, missed_budgets, report, table
from specserve.load.client import Client, LoadError, event_text, num_accepted, parse_event, speculation
from specserve.load.figures import Ratios, Sample, figures, medians, percentile, ratios
from specserve.load.prompts import WORKLOADS, Prompt, prompts


def test_percentile_interpolates_and_knows_nothing_of_nothing() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 1.0], 0.95) == pytest.approx(0.95)
    assert percentile([7.0], 0.95) == 7.0
    assert percentile([], 0.5) is None


def test_figures_of_a_pass_follow_from_its_samples() -> None:
    found = figures([Sample((0.1, 0.2, 0.4), 0.5, 7, 4), Sample((0.3, 0.5), 0.7, 3, 1)], wall_s=2.0)
    assert found.tokens_per_s == 5.0
    assert found.tokens_per_round == 10 / 5
    assert found.ttft_ms_p50 == pytest.approx(200.0)
    assert found.itl_ms_p50 == pytest.approx(200.0)
    assert found.tpot_ms_p50 == pytest.approx((300 / 6 + 200 / 2) / 2)
    assert found.e2e_ms_p50 == pytest.approx(600.0)
    assert found.goodput_rps == 1.0


def test_unknown_rounds_stay_unknown() -> None:
    assert figures([Sample((0.1,), 0.2, 1, None)], wall_s=1.0).tokens_per_round is None
    assert figures([Sample((), 0.2, 0, None)], wall_s=1.0).tpot_ms_p50 is None


def test_medians_are_taken_figure_by_figure() -> None:
    passes = [figures([Sample((0.1, 0.2), 0.2, tokens, 0)], wall_s=1.0) for tokens in (10, 90, 20)]
    assert medians(passes).tokens_per_s == 20


def _by_mode(**tokens: int) -> dict[str, Any]:
    return {mode: figures([Sample((0.1, 0.2), 0.2, count, 0)], 1.0) for mode, count in tokens.items()}


def test_ratios_compare_with_plain_and_the_best_fixed() -> None:
    found = ratios(_by_mode(**{"plain": 10, "fixed:2": 15, "fixed:4": 20, "adaptive": 18}))
    assert found["adaptive"] == Ratios(1.8, 0.9)
    assert ratios(_by_mode(adaptive=5))["adaptive"] == Ratios(None, None)


def test_adaptive_below_its_budget_is_reported() -> None:
    def cell(mode: str, to_plain: float) -> Cell:
        return Cell("open_ended", 1, mode, _by_mode(x=1)["x"], Ratios(to_plain, None))

    assert missed_budgets([cell("adaptive", 0.98), cell("fixed:4", 0.5)]) == []
    assert len(missed_budgets([cell("adaptive", 0.979)])) == 1


def test_events_are_read_and_everything_else_is_skipped() -> None:
    assert parse_event("") is None
    assert parse_event(": keep-alive") is None
    assert parse_event("data: [DONE]") is None
    assert parse_event('data: {"choices": []}') == {"choices": []}
    with pytest.raises(LoadError, match="lost"):
        parse_event('data: {"error": {"message": "lost"}}')


def test_text_is_found_in_chunks_of_both_endpoints() -> None:
    assert event_text({"choices": [{"delta": {"content": "a"}}]}) == "a"
    assert event_text({"choices": [{"text": "b"}]}) == "b"
    assert event_text({"choices": [{"delta": {"content": None}}]}) == ""
    assert event_text({"choices": []}) == ""


def test_accepted_tokens_are_known_only_from_metrics() -> None:
    assert num_accepted({"metrics": {"speculative_decoding": {"num_accepted_draft_tokens": 3}}}) == 3
    assert num_accepted({"metrics": {"speculative_decoding": None}}) is None
    assert num_accepted({}) is None


def test_modes_become_the_speculation_field() -> None:
    assert speculation("plain", "draft") == {"mode": "off"}
    assert speculation("fixed:4") == {"mode": "on", "max_draft_tokens": 4}
    assert speculation("adaptive", "draft") == {"mode": "auto", "proposer": "draft"}
    with pytest.raises(LoadError, match="sometimes"):
        speculation("sometimes")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_each_workload_has_sixteen_different_prompts(workload: Any) -> None:
    found = prompts(workload)
    assert len({prompt.text for prompt in found}) == 16
    assert {prompt.kind for prompt in found} == {"chat" if workload == "copy_heavy" else "completion"}


class _FakeServer(BaseHTTPRequestHandler):
    """Answers as the service does: two chunks of text, then usage and metrics."""

    bodies: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._answer("application/json", json.dumps({"data": [{"id": "fake"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if body["max_tokens"] > 1000:
            self._answer("application/json", '{"error": {"message": "too many"}}', status=400)
            return
        choice = {"delta": {"content": "x"}} if "messages" in body else {"text": "x"}
        last = {
            "choices": [],
            "usage": {"completion_tokens": 6},
            "metrics": {"speculative_decoding": {"num_accepted_draft_tokens": 4}},
        }
        events = [json.dumps({"choices": [choice]})] * 2 + [json.dumps(last), "[DONE]"]
        self._answer("text/event-stream", "".join(f"data: {event}\n\n" for event in events))

    def _answer(self, kind: str, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    handler = type("Handler", (_FakeServer,), {"bodies": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.bodies  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def client(fake: tuple[str, list[dict[str, Any]]]) -> Iterator[Client]:
    made = Client(fake[0])
    yield made
    made.close()


def test_a_streamed_answer_becomes_a_sample(client: Client, fake: tuple[str, list[dict[str, Any]]]) -> None:
    sample = client.stream(client.model_id(), Prompt("here", "chat", "hello"), 8, speculation("fixed:3"))
    assert (len(sample.arrivals_s), sample.num_tokens, sample.num_rounds) == (2, 6, 2)
    sent = fake[1][0]
    assert sent["messages"] == [{"role": "user", "content": "hello"}]
    assert (sent["temperature"], sent["speculation"]) == (0, {"mode": "on", "max_draft_tokens": 3})


def test_a_refusal_is_one_sentence(client: Client) -> None:
    with pytest.raises(LoadError, match="400 to /v1/completions"):
        client.stream("fake", Prompt("here", "completion", "hello"), 2000, speculation("plain"))


def test_modes_are_interleaved_and_reported(client: Client, fake: tuple[str, list[dict[str, Any]]]) -> None:
    cells = measure(client, "fake", "open_ended", Plan(fake[0], 4, ("plain", "adaptive"), 2, 8, None))
    order = [body["speculation"]["mode"] for body in fake[1][::16]]
    assert order == ["off", "auto"] * 3
    assert [cell.figures.tokens_per_round for cell in cells] == [3.0, 3.0]
    assert report("fake", cells)["cells"][0]["ratio_to_plain"] == 1.0
    assert len(table(cells).splitlines()) == 4


def test_no_server_is_said_plainly() -> None:
    nobody = Client("http://127.0.0.1:9")
    with pytest.raises(LoadError, match="specserve serve"):
        nobody.model_id()
    nobody.close()
