"""A server that speaks as ours does, without a model; also a program that stands in for `specserve serve`."""

import argparse
import json
import os
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar


@dataclass
class FakeModel:
    """What the server answers, and what it was asked; `bodies` are those of streams, in order of arrival."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    has_chat: bool = True
    max_model_len: int = 4096
    about: dict[str, Any] = field(
        default_factory=lambda: {"version": "0", "dtype": "bfloat16", "placement": "inline", "model": "fake"}
    )
    num_cached: int = 0
    changed_text_in: str | None = None
    die_after: int | None = None
    cut_streams: bool = False
    proposers: tuple[str, ...] = ()


class Handler(BaseHTTPRequestHandler):
    """Answers streams with two chunks of text, then usage and metrics, in HTTP chunks that split an event."""

    protocol_version = "HTTP/1.1"
    fake: ClassVar[FakeModel]

    def do_GET(self) -> None:
        cards = {"data": [{"id": "fake", "max_model_len": self.fake.max_model_len}]}
        if self.path == "/metrics":
            named = (f'specserve_proposer_available{{engine="0",proposer="{one}"}} 1.0' for one in self.fake.proposers)
            self._send("\n".join(["# TYPE specserve_proposer_available gauge", *named, ""]).encode(), 200)
        else:
            self._whole(cards if self.path == "/v1/models" else self.fake.about)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "messages" in body and not self.fake.has_chat:
            self._whole({"error": {"message": "this model has no chat template"}}, 400)
        elif body["max_tokens"] > 1000:
            self._whole({"error": {"message": "too many"}}, 400)
        elif not body.get("stream"):
            self._whole({"usage": {"prompt_tokens": len(body.get("prompt", "")) // 4}})
        else:
            self.fake.bodies.append(body)
            if self.fake.die_after is not None and len(self.fake.bodies) > self.fake.die_after:
                os._exit(3)
            self._stream(body)

    def _stream(self, body: dict[str, Any]) -> None:
        mode = body["speculation"]["mode"]
        text = "y" if mode == self.fake.changed_text_in else "x"
        choice = {"delta": {"content": text}} if "messages" in body else {"text": text}
        last = {
            "choices": [],
            "usage": {
                "completion_tokens": 6,
                "prompt_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": self.fake.num_cached},
            },
            "metrics": {
                "speculative_decoding": {
                    "num_accepted_draft_tokens": 0 if mode == "off" else 4,
                    "num_draft_tokens": 0 if mode == "off" else 8,
                }
            },
        }
        events = [json.dumps({"choices": [choice]})] * 2 + [json.dumps(last), "[DONE]"]
        payload = "".join(f"data: {event}\n\n" for event in events).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        middle = len(payload) // 3
        parts = [payload[:middle]] if self.fake.cut_streams else [payload[:middle], payload[middle:], b""]
        for part in parts:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.close_connection = True

    def _whole(self, answer: dict[str, Any], status: int = 200) -> None:
        self._send(json.dumps(answer).encode(), status)

    def _send(self, data: bytes, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def serving(fake: FakeModel, port: int = 0) -> ThreadingHTTPServer:
    """Return a server of `fake`; the caller runs and closes it."""
    handler = type("FakeHandler", (Handler,), {"fake": fake})
    return ThreadingHTTPServer(("127.0.0.1", port), handler)


def main() -> None:
    """Serve on the port given, as `specserve serve` does; `--die-after` says how many streams to live for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--die-after", type=int)
    parser.add_argument("--proposers", default="")
    args, _ = parser.parse_known_args()
    named = tuple(name.rpartition(":")[2].lower() for name in args.proposers.split(",") if name)
    fake = FakeModel(die_after=args.die_after, proposers=named)
    server = serving(fake, args.port)
    print("loading ...", file=sys.stderr, flush=True)
    print(f"specserve: ready at http://127.0.0.1:{args.port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        threading.Thread(target=server.shutdown).start()


if __name__ == "__main__":
    main()
