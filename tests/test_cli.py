"""The command line: what works prints what it promises; bad input ends with code 2 and one sentence on stderr."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fasteagle_lite.__main__ import main
from fasteagle_lite.engine import LaneSpec
from fasteagle_lite.trace import Trace
from fasteagle_lite.training.data import Corpus

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(target_folder: Path, checkpoints: Path, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Run a command on the tiny target; returns (exit code, stdout, stderr)."""

    def run(
        command: str, *options: str, target: Path = target_folder, checkpoints: Path = checkpoints
    ) -> tuple[int, str, str]:
        places = ["--target", str(target)]
        if command != "train":
            places += ["--checkpoints", str(checkpoints)]
        capfd.readouterr()
        code = main([command, *places, *options])
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"turns": [prompt]}) + "\n" for prompt in ("Hi", "Who are you?", "😀?")))
    return file


def one_sentence(result: tuple[int, str, str]) -> str:
    code, out, err = result
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("fasteagle_lite: ")
    assert "Traceback" not in err
    return err


# ---- what works -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "cascade", "autoregressive:chain:4", "lookup"])
def test_generate_prints_the_text(drafter: str, cli: Cli) -> None:
    options = ("--prompt", "Hi 😀", "--max-new-tokens", "12")
    code, out, err = cli("generate", *options, "--drafter", drafter)
    trace = Trace.from_json(cli("generate", *options, "--drafter", "none", "--json")[1])
    assert code == 0
    assert out == trace.text + "\n"
    assert "tokens/s" in err


def test_generate_json_is_a_trace(cli: Cli) -> None:
    code, out, _ = cli(
        "generate", "--prompt", "Hi 😀", "--max-new-tokens", "12", "--drafter", "cascade", "--tree", "backbone",
        "--budget", "5", "--temperature", "0.8", "--top-p", "0.9", "--top-k", "40", "--seed", "7", "--json",
    )  # fmt: skip
    trace = Trace.from_json(out)
    assert code == 0
    assert (trace.lane, trace.prompt) == ("cascade:backbone:5", "Hi 😀")
    assert len(trace.tokens) == 12 or trace.finish == "eos"
    assert trace.settings["sampling"] == {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 7}
    assert all(len(r.tokens) <= 5 for r in trace.rounds)


def test_race_lanes_agree(cli: Cli) -> None:
    options = ("--prompt", "Hi", "--max-new-tokens", "12", "--temperature", "1")
    lanes = ("--drafters", "none", "cascade", "autoregressive", "lookup")
    code, out, _ = cli("race", *options, *lanes)
    assert code == 0
    assert out.count("  yes\n") == 4
    assert "NO" not in out
    traces = [Trace.from_json(json.dumps(t)) for t in json.loads(cli("race", *options, *lanes, "--json")[1])]
    assert [t.lane for t in traces] == [
        str(LaneSpec.of(name)) for name in ("none", "cascade", "autoregressive", "lookup")
    ]
    assert len({t.tokens for t in traces}) == 1


def test_race_without_plain_decoding(cli: Cli) -> None:
    code, out, _ = cli("race", "--prompt", "Hi", "--max-new-tokens", "8", "--drafters", "lookup", "cascade")
    assert code == 0
    assert str(LaneSpec.of("lookup")) in out


def test_bench_writes_what_it_promises(cli: Cli, tasks: Path, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    code, out, _ = cli("bench", "--tasks", str(tasks), "--limit", "2", "--max-new-tokens", "10", "--json", str(file))
    assert code == 0
    results = json.loads(file.read_text())
    lanes = [str(LaneSpec.of(name)) for name in ("none", "lookup", "autoregressive", "cascade")]
    assert results["lanes"] == lanes
    assert results.keys() >= {"command", "date", "environment", "max_new_tokens", "sampling", "tasks"}
    assert results["environment"].keys() >= {"device", "cores", "threads", "dtype", "python", "torch", "target"}
    assert list(results["tasks"]["tasks"]) == lanes
    for lane, cell in results["tasks"]["tasks"].items():
        assert cell["identical"] == 1.0
        assert cell["prompts"] == 2
        assert cell.keys() >= {"tokens_per_second", "speedup", "tau", "draft_ms", "verify_ms", "overhead"}
        assert f"| tasks | {lane} |" in out
    assert f"| all | {lanes[-1]} |" in out


def test_train_on_sequences_the_target_writes(cli: Cli, target_folder: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "corpus.npz", tmp_path / "new" / "cascade"
    code, _, err = cli(
        "train", "--drafter", "cascade", "--generate", "20", "--generate-to", str(file), "--out", str(out), "--visits",
        "50", "--vocabulary", "64", "--depths", "2", "--ffn", "16", "--markov-rank", "2", "--state", str(tmp_path / "s"),
    )  # fmt: skip
    assert code == 0
    assert "held-out agreement" in err
    assert Corpus.load([file], 259).response_tokens >= 20
    code, text, _ = cli("generate", "--prompt", "Hi", "--max-new-tokens", "6", checkpoints=out.parent)
    assert code == 0
    assert text == cli("generate", "--prompt", "Hi", "--max-new-tokens", "6", "--drafter", "none")[1]


def test_help_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["generate", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
    assert "--prompt" in capsys.readouterr().out


# ---- bad input --------------------------------------------------------------------------------------------------------

BAD = {
    "empty prompt": (["--prompt", ""], "prompt is empty"),
    "blank prompt": (["--prompt", " \n"], "prompt is empty"),
    "prompt of broken bytes": (["--prompt", "a\udcff"], ""),
    "prompt beyond the context": (["--prompt", "word " * 300], "context is 512"),
    "no tokens": (["--max-new-tokens", "0"], "at least 1"),
    "tokens beyond the context": (["--max-new-tokens", "100000"], "Ask for at most"),
    "temperature below 0": (["--temperature", "-1"], "temperature"),
    "temperature no number": (["--temperature", "nan"], "temperature"),
    "top-p 0": (["--top-p", "0"], "top-p"),
    "top-p above 1": (["--top-p", "1.5"], "top-p"),
    "top-k below 0": (["--top-k", "-1"], "top-k"),
    "seed below 0": (["--seed", "-1"], "seed"),
    "unknown drafter": (["--drafter", "oracle"], "Unknown drafter 'oracle'"),
    "unknown tree": (["--tree", "bush"], "Unknown tree 'bush'"),
    "tree of another drafter": (["--drafter", "lookup", "--tree", "dynamic"], "no 'dynamic' tree"),
    "malformed lane": (["--drafter", "cascade:chain:x"], "is no lane"),
    "lane with too much": (["--drafter", "cascade:chain:3:4"], "is no lane"),
    "budget 0": (["--budget", "0"], "budget is 0"),
    "budget in the lane 0": (["--drafter", "cascade:chain:0"], "budget is 0"),
    "budget far too large": (["--budget", "100000"], "at most 256"),
    "no threads": (["--threads", "0"], "--threads"),
    "unknown device": (["--device", "abacus"], "abacus"),
}


@pytest.mark.parametrize(("options", "words"), BAD.values(), ids=BAD.keys())
def test_bad_input_to_generate(options: list[str], words: str, cli: Cli) -> None:
    given = options if "--prompt" in options else ["--prompt", "Hi", *options]
    assert words in one_sentence(cli("generate", *given))


def test_a_device_that_is_not_there(cli: Cli) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    assert "cuda" in one_sentence(cli("generate", "--prompt", "Hi", "--device", "cuda"))


def test_a_target_that_is_not_there(cli: Cli, tmp_path: Path) -> None:
    assert "No target model" in one_sentence(cli("generate", "--prompt", "Hi", target=tmp_path / "no.gguf"))
    assert "holds no model" in one_sentence(cli("generate", "--prompt", "Hi", target=tmp_path))


def test_checkpoints_that_are_not_there(cli: Cli, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert "does not exist" in one_sentence(cli("generate", "--prompt", "Hi", checkpoints=missing))
    missing.mkdir()
    assert "No cascade drafter is loaded" in one_sentence(cli("generate", "--prompt", "Hi", checkpoints=missing))


def test_checkpoints_that_are_truncated(cli: Cli, checkpoints: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoints, tmp_path / "copy")
    file = next((copy / "cascade").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-50])
    assert "truncated" in one_sentence(cli("generate", "--prompt", "Hi", checkpoints=copy))


def test_checkpoints_of_another_target(cli: Cli, tmp_path: Path) -> None:
    import tiny

    other = tiny.save_target(tmp_path / "other", seed=5)
    assert "trained for tiny" in one_sentence(cli("generate", "--prompt", "Hi", target=other))


def test_bad_input_to_race(cli: Cli) -> None:
    assert "Unknown drafter" in one_sentence(cli("race", "--prompt", "Hi", "--drafters", "none", "oracle"))
    assert "prompt is empty" in one_sentence(cli("race", "--prompt", ""))


def test_bad_input_to_bench(cli: Cli, tasks: Path, tmp_path: Path) -> None:
    missing, bad = tmp_path / "missing.jsonl", tmp_path / "bad.jsonl"
    bad.write_text("{")
    assert "cannot be read" in one_sentence(cli("bench", "--tasks", str(missing)))
    assert "no prompt file" in one_sentence(cli("bench", "--tasks", str(tasks), str(bad)))
    assert "--limit is 0" in one_sentence(cli("bench", "--tasks", str(tasks), "--limit", "0"))
    results = tasks / "results.json"  # below a file
    assert "could not be written" in one_sentence(cli("bench", "--tasks", str(tasks), "--json", str(results)))
    peers = cli("bench", "--tasks", str(tasks), "--peers", "--temperature", "1")
    assert "--peers" in one_sentence(peers)


def test_bad_input_to_train(cli: Cli, tmp_path: Path) -> None:
    assert "Nothing to train on" in one_sentence(cli("train", "--drafter", "cascade"))
    data = ("--data", str(tmp_path / "missing.npz"))
    assert "missing.npz" in one_sentence(cli("train", "--drafter", "cascade", *data))
    assert "--visits is 0" in one_sentence(cli("train", "--drafter", "cascade", *data, "--visits", "0"))
    assert "at least 1" in one_sentence(cli("train", "--drafter", "cascade", "--generate", "0"))
