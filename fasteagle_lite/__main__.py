"""Command line: generate, race, train, bench."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from .errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Run a command; 0 on success, 2 with one sentence on stderr for bad input."""
    options = _parser().parse_args(arguments)
    try:
        _set_threads(options.threads)
        options.run(options)
    except UserError as error:
        print(f"fasteagle_lite: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output went away, such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fasteagle_lite", description="Speculative decoding, seen and measured."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--target", help="safetensors folder, .gguf file or hub name (default: the embedded SmolLM2-135M)"
    )
    common.add_argument("--device", default="cpu", help="cpu or cuda")
    common.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    common.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's own choice)")

    drafted = argparse.ArgumentParser(add_help=False)
    drafted.add_argument("--checkpoints", type=Path, help="folder with cascade/ and autoregressive/ (default: assets/)")
    drafted.add_argument("--max-new-tokens", type=int, default=96)
    drafted.add_argument("--temperature", type=float, default=0.0)
    drafted.add_argument("--top-p", type=float, default=1.0)
    drafted.add_argument("--top-k", type=int, default=0)
    drafted.add_argument("--seed", type=int, default=0)

    generate = commands.add_parser("generate", parents=[common, drafted], help="answer a prompt with one drafter")
    generate.add_argument("--prompt", required=True)
    generate.add_argument("--drafter", default="cascade", help="drafter[:tree[:budget]], such as cascade:backbone:8")
    generate.add_argument("--tree", help="chain, backbone, best_first or dynamic")
    generate.add_argument("--budget", type=int, help="nodes a round verifies, the root included")
    generate.add_argument("--json", action="store_true", help="print the whole trace as JSON")
    generate.set_defaults(run=_generate)

    race = commands.add_parser("race", parents=[common, drafted], help="race several drafters on one prompt")
    race.add_argument("--prompt", required=True)
    race.add_argument("--drafters", nargs="+", default=["none", "autoregressive", "cascade"], metavar="LANE")
    race.add_argument("--json", action="store_true", help="print all traces as JSON")
    race.set_defaults(run=_race)

    bench = commands.add_parser("bench", parents=[common, drafted], help="measure drafters on prompt files")
    bench.add_argument("--tasks", nargs="+", type=Path, required=True, help="question.jsonl files, or folders of them")
    bench.add_argument("--limit", type=int, help="prompts a task")
    bench.add_argument("--drafters", nargs="+", default=["none", "lookup", "autoregressive", "cascade"], metavar="LANE")
    bench.add_argument("--json", type=Path, help="write the results here")
    bench.add_argument("--peers", action="store_true", help="measure transformers' own greedy generate as well")
    bench.set_defaults(run=_bench)

    corpus = commands.add_parser("corpus", parents=[common], help="describe training data; let the target write more")
    corpus.add_argument("--data", nargs="+", type=Path, default=[], help="corpus files (.npz) or folders of them")
    corpus.add_argument(
        "--prompts", nargs="+", type=Path, default=[], help="benchmark prompts that should not occur in it"
    )
    corpus.add_argument("--json", type=Path, help="write the description here")
    corpus.add_argument("--generate", type=int, metavar="N", help="let the target write N response tokens")
    corpus.add_argument("--to", type=Path, help="the file to write them to (.npz)")
    corpus.add_argument("--seed", type=int, default=0)
    corpus.add_argument(
        "--prompts-from", metavar="NAME", help="answer a hub data set's prompts, or a file's or folder's"
    )
    corpus.add_argument("--split", default="train", help="of that data set")
    corpus.add_argument("--column", help="the one with the prompts (default: the first known one)")
    corpus.add_argument("--limit", type=int, help="prompts to take")
    corpus.set_defaults(run=_corpus)

    train = commands.add_parser("train", parents=[common], help="train a drafter on sequences the target wrote")
    train.add_argument("--drafter", required=True, choices=["cascade", "autoregressive"])
    train.add_argument("--data", nargs="+", type=Path, default=[], help="corpus files (.npz) or folders of them")
    train.add_argument("--generate", type=int, metavar="N", help="let the target write N more response tokens first")
    train.add_argument("--generate-to", type=Path, help="where to (default: in the cache folder)")
    train.add_argument("--out", type=Path, help="checkpoint folder (default: assets/DRAFTER)")
    train.add_argument("--start-from", type=Path, help="checkpoint folder to train on from")
    train.add_argument("--state", type=Path, help="folder for resumable training states (default: in the cache folder)")
    for name, kind in (
        ("visits", int), ("sequences", int), ("learning-rate", float), ("decay", float), ("negatives", int),
        ("vocabulary", int), ("depths", int), ("ffn", int), ("markov-rank", int), ("trunk", int),
        ("feature-weight", float), ("optimizer", str), ("supervise", str), ("seed", int),
    ):  # fmt: skip
        train.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS)
    train.add_argument("--own-head", action="store_true", default=argparse.SUPPRESS, help="EAGLE-3's own LM head")
    train.add_argument("--parallel", action="store_true", default=argparse.SUPPRESS, help="no cascade (an ablation)")
    train.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help="bf16 products")
    train.set_defaults(run=_train)

    ablate = commands.add_parser(
        "ablate", parents=[common], help="small equal training runs that differ in one setting"
    )
    ablate.add_argument("--data", nargs="+", type=Path, required=True, help="corpus files (.npz) or folders of them")
    ablate.add_argument("--only", nargs="+", metavar="NAME", help="these runs (default: all)")
    ablate.add_argument("--visits", type=int, default=100_000, help="token visits of each run")
    ablate.add_argument("--trees", type=Path, metavar="FOLDER", help="compare trees over this cascade instead")
    ablate.add_argument("--out", type=Path, help="results file (default: assets/results/ablations.json)")
    ablate.set_defaults(run=_ablate)
    return parser


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        if threads < 1:
            raise UserError(f"--threads is {threads}; it must be at least 1.")
        import torch

        torch.set_num_threads(threads)


def _setup(options: argparse.Namespace):  # type: ignore[no-untyped-def]  # imports are late: --help must not load torch
    from .engine import Engine
    from .sampling import Sampling
    from .store import ASSETS

    sampling = Sampling(options.temperature, options.top_p, options.top_k, options.seed)
    if options.checkpoints is not None and not options.checkpoints.is_dir():
        raise UserError(f"No checkpoints at {options.checkpoints}: the folder does not exist.")
    checkpoints = options.checkpoints or ASSETS
    return Engine.load(options.target, checkpoints=checkpoints, device=options.device, dtype=options.dtype), sampling


def _generate(options: argparse.Namespace) -> None:
    from .engine import LaneSpec

    drafter, *rest = options.drafter.split(":")
    if rest and (options.tree is not None or options.budget is not None):
        raise UserError("Give the tree either behind --drafter or with --tree and --budget, not both.")
    spec = LaneSpec.parse(options.drafter) if rest else LaneSpec.of(drafter, options.tree, options.budget)
    engine, sampling = _setup(options)
    prefix = engine.prefill(options.prompt, options.max_new_tokens)
    rounds = []
    for r in engine.run(spec, prefix, options.max_new_tokens, sampling):
        rounds.append(r)
        if not options.json:
            print("".join(piece for piece in r.text), end="", flush=True)
    trace = engine.trace(spec, options.prompt, prefix, rounds, options.max_new_tokens, sampling)
    if options.json:
        print(trace.to_json())
    else:
        print()
        print(
            f"{trace.lane}: {len(trace.tokens)} tokens in {len(rounds)} rounds, "
            f"{trace.tokens_per_second:.1f} tokens/s, mean accepted length {trace.tau:.2f}",
            file=sys.stderr,
        )


def _race(options: argparse.Namespace) -> None:
    from .bench import warm_up
    from .engine import LaneSpec
    from .race import Contest
    from .trace import first_difference, speedup

    specs = list(dict.fromkeys(map(LaneSpec.parse, options.drafters)))
    engine, sampling = _setup(options)
    warm_up(engine, specs)
    contest = Contest(engine, specs, options.prompt, options.max_new_tokens, sampling)
    for _ in contest:
        pass
    traces = {trace.lane: trace for trace in contest.traces()}
    if options.json:
        print("[" + ",\n".join(trace.to_json() for trace in traces.values()) + "]")
        return
    plain = traces.get("none")
    print((plain or next(iter(traces.values()))).text)
    print(
        f"\n{'lane':<30}{'tokens/s':>9}{'tau':>6}{'vs plain':>10}{'draft ms':>10}{'verify ms':>11}  identical to plain"
    )
    for name, trace in traces.items():
        n = len(trace.rounds)
        ratio = f"{speedup(plain, trace):.2f}x" if plain else "-"
        same = "-" if plain is None else "yes" if first_difference(plain, trace) is None else "NO"
        print(
            f"{name:<30}{trace.tokens_per_second:>9.1f}{trace.tau:>6.2f}{ratio:>10}"
            f"{sum(r.draft_seconds for r in trace.rounds) / n * 1e3:>10.1f}"
            f"{sum(r.verify_seconds for r in trace.rounds) / n * 1e3:>11.1f}  {same}"
        )


def _bench(options: argparse.Namespace) -> None:
    from .bench import measure, read_tasks, table
    from .engine import LaneSpec

    specs = list(dict.fromkeys(map(LaneSpec.parse, options.drafters)))
    if options.peers and options.temperature != 0:
        raise UserError("--peers compares greedy outputs; leave --temperature at 0.")
    tasks = read_tasks(options.tasks, options.limit)
    engine, sampling = _setup(options)
    command = shlex.join(["python", "-m", "fasteagle_lite", *sys.argv[1:]])
    results = measure(
        engine, tasks, specs, options.max_new_tokens, sampling, command=command, out=options.json, peers=options.peers
    )
    print(table(results))


def _corpus(options: argparse.Namespace) -> None:
    import json

    from .bench import read_tasks
    from .store import load_target, load_tokenizer
    from .training.data import Corpus
    from .training.generate import generate_corpus
    from .training.prompts import load_prompts
    from .training.report import corpus_table, describe_corpus

    benchmark = [p for task in read_tasks(options.prompts, None) for p in task.prompts] if options.prompts else []
    data = options.data
    if options.generate is not None:
        if options.to is None or options.to.suffix != ".npz":
            raise UserError("Name the file that the sequences go to: --to FILE.npz")
        if options.to.exists():
            raise UserError(f"{options.to} exists already. Give --to a new name, or delete the file first.")
        if options.prompts_from and data:
            raise UserError("--generate asks either about --data or what --prompts-from holds; give one of them.")
        asked = options.prompts_from
        prompts = load_prompts(asked, options.split, options.column, options.limit) if asked else []
        target = load_target(options.target, device=options.device, dtype=options.dtype)
        about = Corpus.load(data, target.vocab) if data else None
        generate_corpus(
            target, options.to, response_tokens=options.generate, seed=options.seed, about=about, prompts=prompts
        )
        data = [options.to]
    elif options.to or options.prompts_from:
        raise UserError("To let the target write sequences, say how many response tokens: --generate N")
    elif not data:
        raise UserError("Nothing to describe. Give --data with corpus files, or --generate N and --to FILE.npz.")
    tokenizer, config = load_tokenizer(options.target)  # to describe, no weights are needed
    eos = config.eos_token_id
    report = describe_corpus(
        Corpus.load(data, config.vocab_size), tokenizer, eos if isinstance(eos, list) else [eos], benchmark
    )
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"The description could not be written to {options.json} ({error.strerror}).") from None
    print(corpus_table(report))


def _train(options: argparse.Namespace) -> None:
    import dataclasses

    from .store import ASSETS, cache_folder, load_target
    from .training.data import Corpus, Features
    from .training.generate import generate_corpus
    from .training.trainer import TrainConfig, run

    fields = {f.name for f in dataclasses.fields(TrainConfig)}
    config = TrainConfig(**{k: v for k, v in vars(options).items() if k in fields})
    target = load_target(options.target, device=options.device, dtype=options.dtype)
    data = list(options.data)
    if options.generate is not None:
        file = options.generate_to or cache_folder() / "selfdistill" / f"{options.generate}-seed{config.seed}.npz"
        if not file.exists():
            generate_corpus(target, file, response_tokens=options.generate, seed=config.seed)
        if file not in data:
            data.append(file)
    if not data:
        raise UserError(
            "Nothing to train on. Give --data with corpus files, or --generate N to let the target write some."
        )
    corpus = Corpus.load(data, target.vocab)
    # Where products are in bf16 anyway, so is the target's pass over the corpus, at twice the speed.
    reader = load_target(options.target, device=options.device, dtype="bfloat16") if config.bf16 else target
    run(
        config,
        target,
        corpus,
        features=Features(corpus, target, reader),
        out=options.out or ASSETS / config.drafter,
        state_folder=options.state or cache_folder() / "training",
        start_from=options.start_from,
        command=shlex.join(["python", "-m", "fasteagle_lite", *sys.argv[1:]]),
    )


def _ablate(options: argparse.Namespace) -> None:
    from .drafters.checkpoint import load_checkpoint
    from .store import ASSETS, load_target
    from .training.ablate import RUNS, ablate, compare_trees
    from .training.data import Corpus, Features

    target = load_target(options.target, device=options.device, dtype=options.dtype)
    corpus = Corpus.load(options.data, target.vocab)
    out = options.out or ASSETS / "results" / "ablations.json"
    command = shlex.join(["python", "-m", "fasteagle_lite", *sys.argv[1:]])
    if options.trees is not None:
        compare_trees(load_checkpoint(options.trees, target), target, corpus, out, command=command)
        return
    reader = load_target(options.target, device=options.device, dtype="bfloat16")
    features = Features(corpus, target, reader)
    ablate(target, corpus, features, options.only or list(RUNS), options.visits, out, command=command)


if __name__ == "__main__":
    sys.exit(main())
