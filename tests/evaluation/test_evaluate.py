"""Compare perplexities with a computation by hand, between grids, and with lm-eval's own numbers."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Cli
from pool import Pool
from tiny_chat import write_rows
from tiny_corpus import make_corpus, run_file
from tiny_huggingface import make_model
from tiny_task import Uniform, make_task

from fourfold.checkpoints.find_checkpoints import newest_checkpoint
from fourfold.checkpoints.saved_weights import SavedWeights
from fourfold.data.manifest import corpus_tokenizer
from fourfold.data.prepare import prepare
from fourfold.data.prepare_conversations import prepare_conversations
from fourfold.data.tokenizer import ByteTokenizer, HFTokenizer, train_bpe
from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.evaluation.evaluate import EvaluationRequest, prefix_token, run_evaluation
from fourfold.evaluation.perplexity import rolling_windows
from fourfold.evaluation.tasks_in_training import TasksInTraining
from fourfold.huggingface.model_folder import source_of
from fourfold.launch.job_processes import run_on_grid
from fourfold.memorization.scored_model import find_model
from fourfold.models.transformer import Transformer
from fourfold.run_file.load import load_run

TEXT = "What is not read is not known; what is read twice is known by heart. Ünd so weiter. " * 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a text and a run that was trained on bytes."""
    from command_line import exit_code

    folder = tmp_path_factory.mktemp("evaluated")
    prefix = make_corpus(folder)
    (folder / "run.toml").write_text(
        f"""
        output_dir = "{folder}"
        [model]
        preset = "llama-tiny"
        [data]
        train = [{{ path = "{prefix}" }}]
        [training]
        global_batch_size = 8
        seq_length = 32
        train_steps = 4
        [optimizer]
        lr = 1e-2
        """
    )
    assert exit_code("train", folder / "run.toml") == 0
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


def by_hand(run_folder: Path, tokens: list[int], before: int, context: int) -> float:
    """Return the loss of the text in nats, computed with a plain model in windows as long as the context. Each token is
    predicted in exactly one window."""
    (checkpoint,) = (run_folder / "checkpoints").glob("step_*")
    return by_hand_of(SavedWeights(checkpoint), tokens, before, context)


def by_hand_of(saved: SavedWeights, tokens: list[int], before: int, context: int) -> float:
    model = Transformer(saved.model)
    model.load_state_dict({name: saved.read(name) for name in saved.shapes})
    stream, nats = torch.tensor([before, *tokens]), 0.0
    with torch.no_grad():
        for begin in range(1, len(stream), context):
            stop = min(begin + context, len(stream))
            window = stream[max(0, stop - 1 - context) : stop]
            targets = window[1:].clone()
            targets[: begin - stop] = -100  # an earlier window has predicted these tokens already
            nats += model(window[None, :-1], targets[None]).item()
    return nats


def test_every_token_is_predicted_once() -> None:
    tokens = np.arange(1, 102)
    for context, overlap in ((10, 1), (10, 4), (101, 1), (7, 7), (500, 1)):
        windows = rolling_windows(tokens, 0, context, overlap)
        counted = np.concatenate([window.tokens[window.first :] for window in windows])
        assert counted.tolist() == tokens.tolist()
        assert all(len(window.tokens) <= context + 1 for window in windows)
        assert all(window.first >= overlap for window in windows[1:])


def test_windows_equal_the_windows_of_lm_eval() -> None:
    utils = pytest.importorskip("lm_eval.utils")
    for length, context, overlap in ((25, 10, 1), (20, 10, 1), (3, 10, 1), (25, 10, 4), (11, 7, 7)):
        tokens = list(range(1, length + 1))
        theirs = [
            ([*inputs, predicted[-1]], predicted)
            for inputs, predicted in utils.get_rolling_token_windows(tokens, 0, context, overlap)
        ]
        ours = rolling_windows(np.array(tokens), 0, context, overlap)
        assert [(w.tokens.tolist(), w.tokens[w.first :].tolist()) for w in ours] == theirs


def test_perplexity_of_a_run_is_that_by_hand(trained: Path, cli: Cli) -> None:
    code, out, err = cli("evaluate", "--model", trained / "run", "--text", trained / "text.txt", "--json")
    assert code == 0, err
    (found,) = json.loads(out)["texts"].values()
    tokens = list(TEXT.encode())
    nats = by_hand(trained / "run", tokens, ByteTokenizer.eod_id, 32)
    assert found["tokens"] == len(tokens) == found["bytes"]
    assert found["loss"] == pytest.approx(nats / len(tokens), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats / len(tokens)), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(tokens), rel=1e-5)
    code, out, err = cli("evaluate", "--model", trained / "run", "--text", trained / "text.txt", "--overlap", 16)
    assert code == 0 and "perplexity" in out, err


def test_runs_on_pairs_and_on_streams_are_evaluated(trained: Path, cli: Cli, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} is ", "chosen": "even", "rejected": "odd"} for i in range(2, 12, 2)]
    prepare_conversations(
        [write_rows(tmp_path / "rows.jsonl", rows)], tmp_path / "pairs", tokenizer="bytes", format="preferences"
    )
    preferences = f'format = "preferences"\ntrain = [{{ path = "{tmp_path / "pairs"}" }}]\n[dpo]\nbeta = 0.1'
    expected = cli("evaluate", "--model", trained / "run", "--text", trained / "text.txt", "--json")[1]
    for name, data in (("pairs", preferences), ("streams", 'source = "hf:x"\ntokenizer = "bytes"\nstreams = 16')):
        shutil.copytree(trained / "run", tmp_path / name)
        (tmp_path / name / "run.toml").write_text(f'[model]\npreset = "llama-tiny"\n[data]\n{data}\n')
        code, out, err = cli("evaluate", "--model", tmp_path / name, "--text", trained / "text.txt", "--json")
        assert code == 0 and json.loads(out)["texts"] == json.loads(expected)["texts"], err


def evaluated_body(rank: int, world_size: int, request: EvaluationRequest) -> dict[str, Any] | None:
    return run_evaluation(
        Place(rank, rank, world_size, world_size, launcher="local"), request, find_model(request.model, request)
    )


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("overrides", [("parallel.x=2", "parallel.y=2"), ("parallel.z=2", "parallel.pp=2")], ids=str)
def test_a_grid_gives_the_same(pool: Pool, trained: Path, overrides: tuple[str, ...]) -> None:
    asked = {"model": str(trained / "run"), "texts": (trained / "text.txt",)}
    one = pool.run(1, evaluated_body, EvaluationRequest(**asked))[0]
    record, *others = pool.run(4, evaluated_body, EvaluationRequest(**asked, overrides=overrides, micro_batch_size=2))
    assert others == [None] * 3
    (expected,), (found,) = one["texts"].values(), record["texts"].values()
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "nothing to evaluate on"),
        (["--text", "missing.txt"], "missing.txt is not a file"),
        (["--text", "TEXT", "--overlap", 33], "at most 32, the context"),
        (["--text", "TEXT", "--overlap", 9, "--context", 8], "at most 8, the context"),
        (["--text", "TEXT", "--context", 33], "at most 32, the model's context"),
        (["--text", "TEXT", "--tokenizer", "BPE"], "name the model's own tokenizer with --tokenizer"),
    ],
)
def test_refusals(trained: Path, cli: Cli, tmp_path: Path, options: list, says: str) -> None:
    train_bpe(["€" + chr(i) for i in range(300, 400)] * 5, 400, tmp_path / "tokenizer.json")
    (trained / "odd.txt").write_text("".join(chr(i) for i in range(300, 400)), encoding="utf-8")
    replaced = {"TEXT": trained / "odd.txt", "BPE": tmp_path / "tokenizer.json"}
    code, _, err = cli("evaluate", "--model", trained / "run", *(replaced.get(o, o) for o in options))
    assert code == 2 and says in err, err


def make_folder(folder: Path, bos: bool) -> Path:
    """Save a tiny Llama. With ``bos``, its tokenizer puts a token before a text. Otherwise, the tokenizer has no EOS
    token."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, processors

    make_model(folder, "llama", vocab_size=310)
    train_bpe([TEXT] * 5, 300, folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names: dict[str, str] = {}
    if bos:
        tokenizer.add_special_tokens(["<s>"])
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
        names = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder


def test_a_folder_and_its_import_have_the_same_numbers_with_a_token_before_a_text(cli: Cli, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", bos=True)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    checkpoint = tmp_path / "imported" / "checkpoints" / "step_0"
    assert cli("checkpoint", "import-hf", folder, checkpoint)[0] == 0
    found = []
    for model in (folder, checkpoint):
        code, out, err = cli("evaluate", "--model", model, "--text", tmp_path / "text.txt", "--context", 16, "--json")
        assert code == 0, err
        record = json.loads(out[out.index("{") :])
        assert record["context"] == 16
        found += record["texts"].values()
    plain = HFTokenizer(folder / "tokenizer.json")
    tokens = plain.encode_batch([TEXT])[0]
    assert found[0]["tokens"] == found[1]["tokens"] == len(tokens), "the token before the text is not predicted"
    saved = SavedWeights(checkpoint)
    nats = by_hand_of(saved, tokens, plain.bos_id, 16)
    for record in found:
        assert record["loss"] == pytest.approx(nats / len(tokens), rel=1e-5)


def test_the_token_before_a_text_comes_from_the_corpus_or_the_original_model(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "source", bos=True)
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    original = HFTokenizer(source)
    plain, begun = tmp_path / "plain", tmp_path / "begun"
    prepare([tmp_path / "a.txt"], plain, tokenizer=source, workers=1)
    prepare([tmp_path / "a.txt"], begun, tokenizer=source, bos_token="<s>", workers=1)
    assert original.bos_id != original.eod_id
    assert prefix_token(corpus_tokenizer(plain), "m") == original.eod_id
    assert prefix_token(corpus_tokenizer(plain), "m", source) == original.bos_id
    assert prefix_token(corpus_tokenizer(begun), "m") == original.bos_id
    larger = SimpleNamespace(bos_id=None, eod_id=original.vocab_size, fingerprint="of another tokenizer")
    assert prefix_token(larger, "m", source) == original.vocab_size


def test_tasks_in_training_predict_a_text_from_the_token_that_evaluate_uses(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    source = make_folder(tmp_path / "source", bos=True)
    prefix = make_corpus(tmp_path, tokenizer=str(source))
    tasks = make_task(tmp_path, [{"question": "a", "choices": ["b", "c"], "label": 0}])
    changes = {"model__preset": None, "model__from_hf": str(source), "training__train_steps": 1}
    changes |= {"evaluation__interval": 1, "evaluation__tasks": ["tiny_choice"], "training__device": "cpu"}
    run = load_run(run_file(tmp_path, prefix, evaluation__include_path=str(tasks), **changes))
    used = []

    def tasks_of(*run_and_job: Any) -> TasksInTraining:
        callback = TasksInTraining(*run_and_job)
        used.append(callback.model.prefix_token_id)
        return callback

    run_on_grid("fourfold.training.trainer:train", [run, [tasks_of]], 1, "cpu")
    checkpoint = newest_checkpoint(tmp_path / "runs" / "run")
    assert checkpoint is not None
    assert (
        used == [prefix_token(corpus_tokenizer(prefix), "run", source_of(checkpoint))] == [HFTokenizer(source).bos_id]
    )


def test_a_tokenizer_without_an_end_is_refused(cli: Cli, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", bos=False)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    code, _, err = cli("evaluate", "--model", folder, "--text", tmp_path / "text.txt")
    assert code == 2 and "name an eos_token" in err, err


@pytest.mark.usefixtures("alone")
def test_answers_and_prompts_at_their_limits() -> None:
    pytest.importorskip("lm_eval")
    from fourfold.evaluation.harness import HarnessModel

    harness = HarnessModel(Uniform(), ByteTokenizer(), prefix=256, context=8)
    ((log_prob, _),) = harness._loglikelihood_tokens([(None, [1, 2], [3] * 8)])
    assert log_prob == pytest.approx(-8 * math.log(257.0), rel=1e-6)
    with pytest.raises(UserError, match="an answer of the task has 9 tokens, but the model's context has only 8"):
        harness._loglikelihood_tokens([(None, [1, 2], [3] * 9)])
    assert harness.generate_until([SimpleNamespace(args=("", {"max_gen_toks": 3}))]) == ["AAA"]


@pytest.mark.slow
def test_lm_eval_gives_a_run_and_its_export_the_same(cli: Cli, tmp_path: Path) -> None:
    """Run a local task on the run and on its export, and on the export also through lm-eval's own model class."""
    pytest.importorskip("transformers")
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    transformers = pytest.importorskip("transformers")
    folder = make_model(tmp_path / "model", "llama", vocab_size=300)
    train_bpe([TEXT] * 5, 300, tmp_path / "t.json")
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "t.json"), eos_token="<|endoftext|>"
    ).save_pretrained(folder)
    rows = [
        {"question": f"What is {i} read?", "choices": [" heart", " known by", f" twice {i}"], "label": i % 3}
        for i in range(30)
    ]
    tasks = make_task(tmp_path, rows)
    code, _, err = cli("checkpoint", "import-hf", folder, tmp_path / "imported" / "checkpoints" / "step_0")
    assert code == 0, err
    found = []
    for model in (folder, tmp_path / "imported" / "checkpoints" / "step_0"):
        options = ["--tasks", "tiny_choice", "--include-path", tasks, "--json"]
        code, out, err = cli("evaluate", "--model", model, *options)
        assert code == 0, err
        found.append(json.loads(out[out.index("{") :])["tasks"]["tiny_choice"]["acc,none"])
    theirs = lm_eval.simple_evaluate(
        "hf",
        model_args=f"pretrained={folder},dtype=float32",
        device="cpu",
        tasks=["tiny_choice"],
        task_manager=TaskManager(include_path=str(tasks)),
        bootstrap_iters=0,
    )
    assert found == [theirs["results"]["tiny_choice"]["acc,none"]] * 2
