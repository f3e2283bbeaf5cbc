"""`fourfold serve` starts the server of another library on an exported model."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, exit_code
from patience import PATIENCE, wait_until
from tiny_corpus import make_corpus, run_file

from fourfold.data.tokenizer import train_bpe
from fourfold.errors import UserError
from fourfold.inference import server

FOURFOLD = [sys.executable, "-m", "fourfold"]
MODULES = server.ENGINES["transformers"][0]
HAS_TRANSFORMERS = all(importlib.util.find_spec(module) for module in MODULES)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, with a tokenizer that transformers reads."""
    folder = tmp_path_factory.mktemp("served")
    train_bpe(["grid axis tile shard gather reduce scatter token layer head norm loss"] * 20, 300, folder / "t.json")
    path = run_file(
        folder,
        make_corpus(folder, tokenizer=str(folder / "t.json")),
        training__train_steps=1,
        training__device="cpu",
        model__vocab_size=300,
    )
    assert exit_code("train", path) == 0
    return folder / "runs" / "run"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://localhost:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.loads(answer.read())


def answers(port: int) -> bool:
    try:
        ask(port, "/health")
    except (urllib.error.URLError, ConnectionError):
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="the extra serve is not installed")
def test_transformers_serves_a_run(trained: Path) -> None:
    port = free_port()
    words = [*FOURFOLD, "serve", str(trained), "--engine", "transformers", "--port", str(port), "--", "--device", "cpu"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until(lambda: answers(port), process)
        assert [model["id"] for model in ask(port, "/v1/models")["data"]] == ["run"]
        body = {"model": "run", "prompt": "grid axis", "max_tokens": 4, "temperature": 0}
        answer = ask(port, "/v1/completions", body)
    finally:
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=PATIENCE)
    assert isinstance(answer["choices"][0]["text"], str) and answer["usage"]["completion_tokens"] <= 4, printed
    assert "Traceback" not in printed


def test_the_command_that_is_started(trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in shows its words, and that the model is there and goes away afterwards."""
    script = (
        "import os, sys; print(os.listdir(sys.argv[1]), sys.argv[1:], os.getcwd()); "
        "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); os.kill(os.getppid(), signal.SIGTERM); "
        "signal.pause()"
    )
    monkeypatch.setitem(server.ENGINES, "vllm", (("json",), ("-c", script), "pip install vllm"))
    code, out, errors = cli("serve", trained, "--port", 8123, "--name", "mine", "--", "--max-model-len", 32)
    assert code == 7, errors
    assert "model.safetensors" in out and "tokenizer.json" in out
    assert "['mine', '--host', 'localhost', '--port', '8123', '--max-model-len', '32']" in out
    assert not Path(out.split()[-1]).exists()


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that passes for a model, since nobody opens it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text("{}")
    return tmp_path / "small"


def stand_in(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have a script take the place of the server; it writes its number and words into the user's folder."""
    here = Path("server.json").absolute()
    note = f"import json, os, signal, sys; json.dump([os.getpid(), sys.argv[1:]], open({str(here)!r}, 'w')); "
    monkeypatch.setitem(server.ENGINES, "vllm", (("json",), ("-c", note + script), "pip install vllm"))


def started() -> tuple[int, list[str]]:
    number, words = json.loads(Path("server.json").read_text())
    return number, words


ENDS = {
    "Ctrl-C": ("signal.signal(signal.SIGINT, lambda *_: sys.exit(3)); os.kill(os.getppid(), signal.SIGINT)", 3),
    "SIGTERM, by which it dies": ("os.kill(os.getppid(), signal.SIGTERM)", 143),
    "a closed terminal": ("os.kill(os.getppid(), signal.SIGHUP)", 129),
}


@pytest.mark.parametrize(("script", "code"), ENDS.values(), ids=ENDS.keys())
def test_signals_reach_the_server_and_nothing_is_left(
    exported: Path, monkeypatch: pytest.MonkeyPatch, script: str, code: int
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:  # as under nohup, or in the background of a shell
            signal.signal(number, signal.SIG_DFL)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    stand_in(monkeypatch, f"{script}; signal.pause()")
    assert server.serve("small", "vllm", "localhost", 8000) == code
    with pytest.raises(ProcessLookupError):
        os.kill(started()[0], 0)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a process of its starter's end")
def test_the_server_ends_in_order_where_fourfold_is_killed(exported: Path) -> None:
    there, ended = exported.parent / "there", exported.parent / "ended"
    stand_in = (
        f"import os, pathlib, signal, sys; end = lambda *_: (pathlib.Path({str(ended)!r}).touch(), sys.exit()); "
        f"signal.signal(signal.SIGTERM, end); pathlib.Path({str(there)!r}).touch(); signal.pause()"
    )
    serve = (
        "from fourfold.inference import server; "
        f"server.ENGINES['vllm'] = (('json',), ('-c', {stand_in!r}), ''); "
        "server.serve('small', 'vllm', 'localhost', 8000)"
    )
    process = subprocess.Popen([sys.executable, "-c", serve], env={**os.environ, "TMPDIR": str(exported.parent)})
    wait_until(there.exists, process)
    process.kill()
    process.wait()
    wait_until(ended.exists)


def test_an_ignored_signal_stays_ignored(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SIGHUP under nohup."""
    stand_in(monkeypatch, "os.kill(os.getppid(), signal.SIGHUP); os.kill(os.getpid(), signal.SIGHUP); sys.exit(5)")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert server.serve("small", "vllm", "localhost", 8000) == 5
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("script", "code"), [("sys.exit(1)", 1), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_the_exit_code_is_that_of_the_server(
    exported: Path, monkeypatch: pytest.MonkeyPatch, script: str, code: int
) -> None:
    stand_in(monkeypatch, script)
    assert server.serve("small", "vllm", "localhost", 8000) == code


def test_a_signal_while_the_server_starts_is_not_lost(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = start(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    stand_in(monkeypatch, "signal.pause()")
    monkeypatch.setattr(server.subprocess, "Popen", interrupted)
    assert server.serve("small", "vllm", "localhost", 8000) == 143


def test_a_signal_during_the_export_removes_it(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    @contextmanager
    def exporting(model: str) -> Iterator[tuple[str, str]]:
        with tempfile.TemporaryDirectory() as place:
            made.append(place)
            os.kill(os.getpid(), signal.SIGTERM)
            yield place, place

    stand_in(monkeypatch, "pass")
    monkeypatch.setattr(server, "as_huggingface", exporting)
    with pytest.raises(SystemExit) as ended:
        server.serve("small", "vllm", "localhost", 8000)
    assert ended.value.code == 143 and not Path(made[0]).exists() and not Path("server.json").exists()


def test_paths_among_the_options_of_the_server(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "pass")
    (exported.parent / "chat.jinja").write_text("")
    (exported.parent / "cpu").mkdir()
    options = [
        "--chat-template",
        "chat.jinja",
        "--lora=a=small/config.json",
        "--device",
        "cpu",
        "--share",
        "0.9",
        "a/b",
    ]
    assert server.serve("small/../small", "vllm", "localhost", 8000, None, options) == 0
    here = exported.parent
    assert started()[1] == [
        *("small", "--host", "localhost", "--port", "8000", "--chat-template", f"{here}/chat.jinja"),
        *(f"--lora=a={here}/small/config.json", "--device", "cpu", "--share", "0.9", "a/b"),
    ]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("d/lr=0.1/t.jinja", "{here}/d/lr=0.1/t.jinja"),
        ("--chat-template=d/a=b.jinja", "--chat-template={here}/d/a=b.jinja"),
        ("org/m", "org/m"),
        ("./org/m", "{here}/org/m"),
        ("sql=./org/m", "sql={here}/org/m"),
        ("--served-model-name=org/m", "--served-model-name=org/m"),
        ("d/lr=0.1/absent", "d/lr=0.1/absent"),
        ("--plain", "--plain"),
    ],
)
def test_paths_with_equals_signs_and_names_that_folders_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("d/lr=0.1", "org/m"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("d/lr=0.1/t.jinja", "d/a=b.jinja"):
        (tmp_path / file).write_text("")
    assert server.with_absolute_path(word) == expected.format(here=tmp_path)


def test_a_folder_whose_name_is_none_for_a_model(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "pass")
    exported.rename("my model")
    with pytest.raises(UserError, match=r"my model, the name of the model's folder, must be .* --name org/model"):
        server.serve("my model", "vllm", "localhost", 8000)
    assert server.serve("my model", "vllm", "localhost", 8000, "mine") == 0 and started()[1][0] == "mine"


def test_what_is_missing_is_named(trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = (("no_such_library",), ("-m", "nothing"), "pip install it")
    monkeypatch.setitem(server.ENGINES, "vllm", absent)
    code, _, errors = cli("serve", trained, "--engine", "vllm")
    assert code == 2 and "--engine vllm needs the library no_such_library: pip install it" in errors
    monkeypatch.setitem(server.ENGINES, "transformers", absent)
    code, _, errors = cli("serve", trained)
    assert code == 2 and "serving needs vLLM (pip install it) or transformers' server: pip install it" in errors


def test_bytes_cannot_be_served(tmp_path: Path, prefix: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(server.ENGINES, "vllm", (("json",), ("-c", ""), "pip install vllm"))
    path = run_file(tmp_path, prefix, training__train_steps=1, training__device="cpu")
    assert cli("train", path)[0] == 0
    code, _, errors = cli("serve", tmp_path / "runs" / "run")
    assert code == 2 and "has no tokenizer that a server can use" in errors
