"""`kvist bench compare`, `show`, `sweep`, `prefix` and `throughput --baseline` on a tiny model, with a stand-in for a peer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.fake_peers import write_llama_server
from helpers.tiny_models import write_tiny_gguf
from kvist.cli import main as cli


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    return str(write_tiny_gguf(tmp_path / "tiny.gguf"))


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", *arguments])
    printed = capsys.readouterr()
    return int(left.value.code or 0), printed.out, printed.err


def test_compare_saves_prints_and_draws_what_show_shows_again(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_llama_server(tmp_path)
    saved, plot = tmp_path / "report.json", tmp_path / "plot.png"
    arguments = ["compare", "-m", model, "--peer", f"llamacpp={tmp_path}", "--peer", "vllm=/nowhere", "--num-kv-blocks", "32"]
    arguments += [
        "--works",
        "decode_1,prefill_512",
        "--rounds",
        "1",
        "--num-threads",
        "1",
        "--save",
        str(saved),
        "--plot",
        str(plot),
    ]
    status, out, _ = run([*arguments, "--json"], capsys)
    report = json.loads(out)
    assert status == 0
    assert report == json.loads(saved.read_text(encoding="utf-8"))
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert [one["name"] for one in report["contenders"]] == ["kvist", "llamacpp"]
    assert (report["rounds"], report["num_threads"], report["model"]["name"]) == (1, 1, "tiny")
    decode, prefill = report["works"]
    assert decode["medians"].keys() == {"kvist", "llamacpp"}
    assert decode["ratio_to_best"] == pytest.approx(decode["medians"]["kvist"] / decode["medians"]["llamacpp"])
    # The tiny model's context holds 512 tokens, prompt and answer together.
    assert prefill["medians"].keys() == {"llamacpp"}
    assert [row["work"] for row in report["roofline"]["works"]] == ["decode_1"]
    reasons = {(one["contender"], one["work"]): one["reason"] for one in report["failures"]}
    assert reasons.keys() == {("vllm", None), ("kvist", "prefill_512")}
    assert "512" in reasons["kvist", "prefill_512"]

    status, out, _ = run(["show", str(saved), "--markdown"], capsys)
    assert status == 0
    assert out.splitlines()[0] == "| work | kvist | llamacpp | kvist to the best peer |"
    assert "- could not run vllm: there is no Python environment in /nowhere" in out
    status, out, _ = run(["show", str(saved)], capsys)
    assert (status, "decode_1, tokens/s" in out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--works", "decode_2"], "'decode_2' is no work"),
        (["--shape", "7b"], "'7b' is no shape"),
        (["--shape", "1b", "-m", "other.gguf"], "--shape makes its own model"),
        (["--save", "/nowhere/report.json"], "There is no folder /nowhere to save report.json in."),
        (["--plot", "/nowhere/plot.png"], "There is no folder /nowhere to put plot.png in."),
        (["--save", "/"], "/ is a folder; name a file to save in."),
        (["--plot", "/"], "/ is a folder; name a file for the plot."),
        (["--plot", "plot.txt"], "A plot cannot be written as .txt; name plot.png or so."),
    ],
)
def test_compare_refuses_in_a_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(["compare", "--peer", "vllm=/nowhere", *arguments], capsys)
    assert (status, out) == (2, "")
    assert message in err


def test_compare_without_peers_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(["compare"], capsys)
    assert (status, "--peer NAME=FOLDER" in err) == (2, True)


def test_a_start_runs_no_works(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(["latency", "--startup", "--works", "decode_1"], capsys)
    assert (status, "--startup runs no works" in err) == (2, True)


@pytest.mark.parametrize(
    "text", ["{", '{"command": "throughput"}', "[]", '{"command": "compare"}', '{"command": "compare", "works": 3}']
)
def test_show_takes_only_what_compare_saved(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    status, _, err = run(["show", str(tmp_path / "x.json")], capsys)
    assert (status, "x.json is " in err, "Traceback" in err) == (2, True, False)
    status, _, err = run(["show", str(tmp_path / "y.json")], capsys)
    assert (status, err) == (2, f"kvist: Cannot read {tmp_path / 'y.json'}: No such file or directory.\n")


def test_a_baseline_warns_and_does_not_fail(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["throughput", "-m", model, "--works", "decode_1", "--rounds", "1", "--num-threads", "1", "--num-kv-blocks", "32"]
    _, out, _ = run([*arguments, "--json"], capsys)
    report = json.loads(out)
    assert "baseline" not in report
    report["measurements"][0]["median"] *= 1000
    baseline = tmp_path / "baseline.json"
    baseline.write_text(json.dumps([report]), encoding="utf-8")
    status, out, err = run([*arguments, "--baseline", str(baseline), "--json"], capsys)
    assert status == 0
    assert json.loads(out)["baseline"]["slower"] == ["decode_1"]
    assert "warning: decode_1 is slower than 80% of the baseline: 0.0" in err
    _, out, _ = run([*arguments, "--baseline", str(baseline)], capsys)
    assert ("Beside the baseline of" in out, "× the baseline" in out) == (True, True)
    report["machine"]["cpu"]["name"] = "another"
    baseline.write_text(json.dumps(report), encoding="utf-8")
    status, out, err = run([*arguments, "--baseline", str(baseline)], capsys)
    assert (status, "nothing was compared: this is" in err) == (0, True)
    assert " on another (" in err.split("and the baseline has")[1]


def test_sweep_prints_a_row_for_each_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    large = str(write_tiny_gguf(tmp_path / "tiny.gguf", context=4096, layers=1))
    arguments = ["sweep", "-m", large, "--option", "max-num-seqs=2,16", "--rounds", "1", "--num-kv-blocks", "512"]
    status, out, _ = run([*arguments, "--markdown"], capsys)
    lines = out.splitlines()
    assert status == 0
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| --max-num-seqs 2", "| --max-num-seqs 16"]
    assert lines[0].count("|") == 7
    # The second value is looked at before the first one is measured.
    status, out, err = run([*arguments[:-5], "num-threads=1,99999"], capsys)
    assert (status, out, err) == (2, "", "kvist: num_threads is at most 1024, not 99999; the number of CPUs serves best.\n")


def test_prefix_goes_on_with_what_it_kept_and_draws_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    saved, picture = tmp_path / "runs.json", tmp_path / "prefix.png"
    arguments = ["prefix", "-m", str(write_tiny_gguf(tmp_path / "tiny.gguf", context=512, layers=1)), "--num-kv-blocks", "64"]
    arguments += ["--requests", "4", "--prefix-tokens", "64", "--own-tokens", "8", "--new-tokens", "4", "--cached-tokens", "96"]
    status, out, _ = run([*arguments, "--rounds", "1", "--save", str(saved), "--json"], capsys)
    report, kept = json.loads(out), json.loads(saved.read_text())["runs"]
    assert (status, report["rounds"], [one["part"] for one in kept]) == (0, 1, ["shared", "alone", "first_token"])
    assert report["blocks"] == {"peak_shared": 8, "peak_alone": 20, "one_copy": 8, "copies": 20}
    assert report["computed_tokens"] == {"shared": 64 + 4 * 11, "alone": 4 * (72 + 3)}
    status, out, _ = run([*arguments, "--rounds", "2", "--save", str(saved), "--plot", str(picture)], capsys)
    assert (status, "crowd.gain" in out, "held 8 blocks" in " ".join(out.split())) == (0, True, True)
    assert json.loads(saved.read_text())["runs"][:3] == kept
    assert [one["round"] for one in json.loads(saved.read_text())["runs"]] == [0, 0, 0, 1, 1, 1]
    assert picture.read_bytes()[:4] == b"\x89PNG"
    status, _, err = run([*arguments, "--requests", "5", "--save", str(saved)], capsys)
    assert (status, "kept with another crowd" in err) == (2, True)
    status, _, err = run([*arguments, "--requests", "50"], capsys)
    assert (status, "and the pool has 64" in err) == (2, True)
    status, _, err = run([*arguments, "--no-enable-prefix-caching"], capsys)
    assert (status, "runs with sharing and without" in err) == (2, True)
