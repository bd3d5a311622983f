"""The `specserve` command. Arguments live here and rooms are imported when a command runs, so `--help` is quick."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from specserve.service.errors import SpecserveError

Parser = argparse.ArgumentParser
MODEL_HELP = "a folder, a .gguf file, a hub id (org/name[@revision]) or gemma-3-270m (default: the embedded model)"
HEADS = {
    "eagle": "an EAGLE-1 or EAGLE-2 head",
    "eagle3": "an EAGLE-3 head",
    "medusa": "Medusa heads",
    "mtp": "an MTP module (DeepSeek, GLM, Qwen3-Next or MiMo layout)",
}
PROPOSERS = {
    "prediction": "follows the text a request predicts (OpenAI's `prediction`); needs nothing else",
    "prompt_lookup": "copies what followed the same tokens earlier in the request; needs nothing",
    "suffix": "continues like the request, or earlier answers of its cache_salt, did; needs nothing",
    "draft": "a small model, of any vocabulary; needs --draft MODEL, or the embedded target",
    "eagle": "an EAGLE-1 or EAGLE-2 head, which runs on from the last hidden state; needs --eagle DIR",
    "eagle3": "an EAGLE-3 head, which reads the target at three depths; needs --eagle3 DIR, or the embedded target",
    "medusa": "heads that each guess one token further at once; needs --medusa DIR, or the embedded target",
    "mtp": "a target's own multi-token prediction module, looped; needs --mtp DIR, or the embedded target",
    "layer_skip": "the target without some of its layers; needs --layer-skip N,N, or a file that training finds",
    "early_exit": "the target's first layers and its head; needs --early-exit N, and a target trained for it",
}
POLICY_HELP = "off, fixed:N, adaptive or a policy file (default: %(default)s)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; what the user did wrong is one sentence and 2."""
    args = parser().parse_args(argv)
    # Before torch loads: its threads wait about 0.1 ms for the next product instead of holding a core for 15.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    try:
        code: int = args.run(args)
    except SpecserveError as error:
        print(f"specserve {args.command}: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def parser() -> Parser:
    """Return the parser of every command; the parsed namespace's `run` takes it and returns the exit code."""
    top = Parser(prog="specserve", description="Speculative decoding on Ray Serve.", epilog="Example: specserve serve")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _command(commands, "serve", "serve a model over HTTP", "specserve serve --policy adaptive", _serve, _run_serve)
    _command(
        commands,
        "generate",
        "complete a prompt in this process",
        "specserve generate --prompt 'def add(a, b):' --max-tokens 32",
        _generate,
        _run_generate,
    )
    _command(commands, "proposers", "list the proposers", "specserve proposers", _proposers, _run_proposers)
    _command(
        commands,
        "keys",
        "make an API key and its entry for --api-keys",
        "specserve keys new --id team-a --tier priority --requests-per-minute 600",
        _keys,
        _run_keys,
    )
    _command(
        commands,
        "bench",
        "measure plain, fixed and adaptive speculation on the same prompts",
        "specserve bench --sweep --json bench.json",
        _bench,
        _run_bench,
    )
    _command(
        commands,
        "load",
        "send open-loop traffic with tiers and ramps, in each mode",
        "specserve load --shape 1-30-1 --seconds 60 --tiers priority=1,default=3 --objectives priority=8 --report out",
        _load,
        _run_load,
    )
    _command(
        commands,
        "policy",
        "steer the policy of a running service",
        "specserve policy apply fixed:4 --reason 'quiet night'",
        _policy,
        _run_policy,
    )
    _command(
        commands,
        "train",
        "train heads and draft models, or the embedded models again",
        "specserve train draft --target service/embedded/target --output out/draft",
        _train,
        _run_train,
    )
    return top


def _command(
    commands: "argparse._SubParsersAction[Parser]",
    name: str,
    summary: str,
    example: str,
    add_arguments: Callable[[Parser], None],
    run: Callable[[argparse.Namespace], int],
) -> None:
    made = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=f"Example: {example}"
    )
    add_arguments(made)
    made.set_defaults(run=run)


def _comma_separated(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _layers(text: str) -> tuple[int, ...] | str:
    parts = _comma_separated(text)
    return tuple(int(part) for part in parts) if parts and all(part.isdecimal() for part in parts) else text


def _proposers(parser: Parser) -> None:
    parser.add_argument("paths", nargs="*", metavar="MODULE:CLASS", help="proposers of your own, to be made and listed")


def _serve(parser: Parser) -> None:
    """Add the flags of ServiceSettings. None is absent, so that a flag wins over the file only where it is given."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--config", metavar="FILE", help="YAML of settings, named as in ServiceSettings; flags win")
    _drafting(parser)
    parser.add_argument(
        "--draft-quantization", choices=("int8",), help="keep the draft model's weights so (default: as --dtype)"
    )
    parser.add_argument(
        "--suffix-drafts", choices=("tree", "chain"), help="what suffix decoding drafts (default: tree)"
    )
    parser.add_argument(
        "--head-drafts",
        choices=("tree", "chain"),
        help="what heads draft for greedy requests, as many tokens either way: a tree of likely continuations, or the"
        " likeliest one; sampled requests get chains (default: tree)",
    )
    parser.add_argument(
        "--proposers",
        type=_comma_separated,
        metavar="A,B",
        help="what may draft; without this, all that was given but suffix and the embedded target's own heads",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        help="of weights and KV; auto is bfloat16 where the processor has it (default: auto)",
    )
    parser.add_argument(
        "--placement", choices=("actors", "inline"), help="a process for each part, or one for all (default: actors)"
    )
    parser.add_argument("--host", help="address to bind (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port of the OpenAI API (default: 8000)")
    parser.add_argument("--admin-port", type=int, help="port of the admin API (default: the one after --port)")
    parser.add_argument("--policy-store", metavar="FILE", help="SQLite file of policies (default: one an admin port)")
    parser.add_argument(
        "--policy", metavar="off|fixed:N|adaptive|FILE", help="what decides how much is drafted (default: adaptive)"
    )
    parser.add_argument("--api-keys", metavar="FILE", help="YAML of API keys' hashes; see `specserve keys`")
    parser.add_argument(
        "--admin-key-file", metavar="FILE", help="holds the admin key (default: what SPECSERVE_ADMIN_KEY holds)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where the models run (default: auto)")
    numbers = {
        "max-model-len": "tokens of prompt and output together (default: all the model can)",
        "num-pages": "KV pages (default: 2048)",
        "page-tokens": "tokens of a KV page (default: 16)",
        "max-running": "requests that take part in a round (default: 32)",
        "prefill-tokens": "prompt tokens that a round takes in when nobody decodes (default: 512)",
        "prefill-tokens-busy": "prompt tokens that a round takes in beside decoding ones (default: 128)",
    }
    for name, text in numbers.items():
        parser.add_argument(f"--{name}", type=_positive, metavar="N", help=text)
    parser.add_argument("--threads", dest="num_threads", type=_positive, metavar="N", help="of a forward (default: 2)")


def _drafting(parser: Parser) -> None:
    """Add what proposers of a served model need to be told."""
    parser.add_argument("--draft", metavar="MODEL", help="the draft model, named like MODEL (default: the embedded's)")
    for name, what in HEADS.items():
        parser.add_argument(f"--{name}", metavar="DIR", help=f"{what} made for MODEL")
    parser.add_argument(
        "--layer-skip", type=_layers, metavar="N,N|FILE", help="layers that MODEL leaves out to draft for itself"
    )
    parser.add_argument("--early-exit", type=_positive, metavar="N", help="layers after which MODEL drafts for itself")


def _run_serve(args: argparse.Namespace) -> int:
    from specserve.deployments.serve import run

    return run(args)


def _generate(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--prompt", required=True, help="text to complete")
    parser.add_argument("--max-tokens", type=_positive, default=64, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--policy", default="adaptive", metavar="off|fixed:N|adaptive|FILE", help=POLICY_HELP)
    parser.add_argument("--proposer", help="the only proposer to use (default: the policy chooses)")


def _run_generate(args: argparse.Namespace) -> int:
    from specserve.deployments.generate import run

    return run(args)


def _run_proposers(args: argparse.Namespace) -> int:
    for name, what in PROPOSERS.items():
        print(f"{name:13}  {what}")
    print("MODULE:CLASS   your own (specserve.service.plugins shows one); needs a policy or a request that names it")
    if args.paths:
        from specserve.service.plugins import load_plugin

        for plugin in map(load_plugin, args.paths):
            print(f"{plugin.name:13}  {(type(plugin).__doc__ or 'a plug-in').strip().splitlines()[0]}")
    return 0


def _keys(parser: Parser) -> None:
    """Add what there is to do with keys; the flags of `new` are the fields of an entry."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="new|show")
    new = actions.add_parser(
        "new", help="print a fresh key, once, and its entry", epilog="Example: specserve keys new --id team-a"
    )
    new.add_argument("--id", required=True, metavar="NAME", help="who it is for; logs and quotas go by it")
    new.add_argument(
        "--tier", choices=("priority", "default", "flex"), default="default",
        help="the best tier it may ask for, and gets when it asks for none (default: %(default)s)",
    )  # fmt: skip
    new.add_argument(
        "--role", choices=("client", "viewer", "operator"), default="client",
        help="client: the public API; viewer: reads the admin API; operator: changes it (default: %(default)s)",
    )  # fmt: skip
    for name in ("requests-per-minute", "tokens-per-minute", "max-concurrent"):
        new.add_argument(f"--{name}", type=_positive, metavar="N", help="default: without limit")
    show = actions.add_parser(
        "show", help="check a file of keys and list who is in it", epilog="Example: specserve keys show keys.yaml"
    )
    show.add_argument("file", type=Path, metavar="FILE")


def _run_keys(args: argparse.Namespace) -> int:
    from specserve.deployments.keys import run

    return run(args)


def _positive_numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in _comma_separated(text)) or (_positive(text),)


def _temperature(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 2:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 2")
    return number


BENCH_EXAMPLES = """\
Examples:
  specserve bench                                       the embedded model, one request at a time
  specserve bench --sweep --json bench.json --report out    every workload, 1, 4 and 16 requests at a time
  specserve bench gemma-3-270m --against transformers   beside transformers' own generate
  specserve bench --url http://127.0.0.1:8000           a server that is running already
  specserve bench --proposers all --report out          each proposer by itself, beside plain decoding, in one table
"""


def _bench(parser: Parser) -> None:
    parser.epilog, parser.formatter_class = BENCH_EXAMPLES, argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what to serve (default: the embedded model)")
    parser.add_argument("--url", help="measure the server there instead of starting one")
    parser.add_argument(
        "--placement",
        choices=("inline", "actors"),
        help="of the server started (default: actors; inline with --proposers)",
    )
    parser.add_argument(
        "--proposers",
        type=_comma_separated,
        metavar="A,B|all",
        help="measure each by itself beside plain decoding, NAME:tree and NAME:chain apart (all: what can be built)",
    )
    parser.add_argument(
        "--sweep", action="store_true", help="all workloads, concurrency 1,4,16, modes plain,fixed:2,4,8,adaptive"
    )
    parser.add_argument(
        "--concurrency",
        type=_positive_numbers,
        metavar="N,N",
        help="requests in flight at a time (default: 1; 1,8 with --proposers)",
    )
    parser.add_argument(
        "--modes",
        type=_comma_separated,
        metavar="A,B",
        help="plain, fixed:N, adaptive (default: plain,fixed:4,adaptive; fixed:2,4,8 with --proposers)",
    )
    parser.add_argument(
        "--workloads",
        type=_comma_separated,
        metavar="A,B",
        help="copy_heavy, open_ended, mixed, long_prompt, code, repeated "
        "(default: copy_heavy,open_ended; with --proposers copy_heavy,code,open_ended,repeated)",
    )
    parser.add_argument("--against", choices=("transformers",), help="measure its generate too, in the same run")
    _drafting(parser)
    _bench_size(parser)
    _bench_output(parser)


def _bench_size(parser: Parser) -> None:
    parser.add_argument("--repeats", type=_positive, default=3, help="measured passes (default: %(default)s)")
    parser.add_argument(
        "--prompts", type=_positive, default=8, help="of each workload, at least the concurrency (default: %(default)s)"
    )
    parser.add_argument("--max-tokens", type=_positive, default=128, help="new tokens a request (default: %(default)s)")
    parser.add_argument("--temperature", type=_temperature, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--proposer", help="the only proposer to use (default: the policy chooses)")


def _bench_output(parser: Parser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the results here")
    parser.add_argument("--report", metavar="DIR", help="write report.md and a plot here")
    parser.add_argument("--check", action="store_true", help="a budget in doubt, or not checked, fails too")


def _run_bench(args: argparse.Namespace) -> int:
    from specserve.load.bench import run

    args.buildable = ()
    if args.proposers and args.url is None:
        from specserve.deployments.serve import buildable

        args.buildable = buildable(args, tuple(PROPOSERS))
    return run(args)


def _policy(parser: Parser) -> None:
    from specserve.deployments.steering import add_commands

    add_commands(parser)


def _run_policy(args: argparse.Namespace) -> int:
    from specserve.deployments.steering import run

    return run(args)


def _load(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what to serve (default: the embedded model)")
    parser.add_argument("--url", help="load the server there instead of starting one")
    parser.add_argument(
        "--placement", choices=("inline", "actors"), default="actors", help="of the server started (default: actors)"
    )
    parser.add_argument(
        "--shape", default="1-30-1", metavar="R-R-R", help="requests a second, a line between each (default: 1-30-1)"
    )
    parser.add_argument("--seconds", type=_positive, default=60, help="how long requests come (default: %(default)s)")
    parser.add_argument(
        "--tiers",
        type=_comma_separated,
        default=("priority=1", "default=3"),
        metavar="T=W,T=W",
        help="service tiers and their weights (default: priority=1,default=3)",
    )
    parser.add_argument(
        "--objectives",
        type=_comma_separated,
        default=(),
        metavar="T=MS,T=MS",
        help="milliseconds a token (default: priority=30,default=80,flex=200)",
    )
    parser.add_argument(
        "--modes",
        type=_comma_separated,
        default=("adaptive",),
        metavar="A,B",
        help="plain, fixed:N, adaptive (default: adaptive)",
    )
    parser.add_argument(
        "--workload",
        default="mixed",
        help="copy_heavy, open_ended, mixed, long_prompt, code, repeated (default: mixed)",
    )
    parser.add_argument("--max-tokens", type=_positive, default=64, help="new tokens a request (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals (default: %(default)s)")
    parser.add_argument(
        "--repeats",
        type=_positive,
        default=1,
        help="passes of each mode, in turns; 3 give errors (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the results here")
    parser.add_argument("--report", metavar="DIR", help="write load.md and the trace's plot here")


def _run_load(args: argparse.Namespace) -> int:
    from specserve.load.loading import run

    return run(args)


def _train(parser: Parser) -> None:
    recipes = parser.add_subparsers(dest="recipe", required=True, metavar="base|draft|eagle3|medusa|mtp|layer_skip")
    base = recipes.add_parser("base", help="the target", epilog="Example: specserve train base --output out/target")
    draft = recipes.add_parser(
        "draft",
        help="the draft model, distilled from a target",
        epilog="Example: specserve train draft --target out/target --output out/draft",
    )
    heads = [
        recipes.add_parser(
            name,
            help=f"{what} for a target",
            epilog=f"Example: specserve train {name} --target out/target --data src --output out/head",
        )
        for name, what in (("eagle3", "an EAGLE-3 head"), ("medusa", "Medusa heads"), ("mtp", "an MTP module"))
    ]
    layer_skip = recipes.add_parser(
        "layer_skip",
        help="search which layers a target leaves out to draft for itself",
        epilog="Example: specserve train layer_skip --target out/target --data src --output out/layer_skip.json",
    )
    layer_skip.add_argument("--output", type=Path, required=True, metavar="FILE", help="where the choice goes")
    layer_skip.add_argument("--steps", type=_positive, help="choices that are tried (default: 200)")
    for recipe in (*heads, layer_skip):
        recipe.add_argument(
            "--data", type=Path, nargs="+", metavar="PATH", help="text files or folders (default: Python's library)"
        )
    for recipe in (draft, *heads, layer_skip):
        recipe.add_argument("--target", type=Path, required=True, metavar="DIR", help="folder of the target")
    for recipe in (base, draft, *heads):
        recipe.add_argument("--output", type=Path, required=True, metavar="DIR", help="where the model goes")
        recipe.add_argument(
            "--run-dir",
            type=Path,
            default=Path("training-runs/embedded"),
            metavar="DIR",
            help="checkpoints and data; a run found there is resumed (default: %(default)s)",
        )
        recipe.add_argument("--steps", type=_positive, help="default: the recipe's")


def _run_train(args: argparse.Namespace) -> int:
    from specserve.service.training.cli import run

    return run(args)


if __name__ == "__main__":
    sys.exit(main())
