"""Try every type of causal language model in transformers, and write docs/model-types.md: python docs/model_types.py

The script builds a tiny random model of each type. It imports, exports, trains, plans, and parallelizes the model,
generates text with it, and runs it with Loki. It compares the results with the results of the transformers library. If
you name types on the command line, the script prints only the rows of these types, and does not write the page.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests")]

import torch  # noqa: E402
import transformers  # noqa: E402
from pool import Pool  # noqa: E402 (from here on, imports find modules in tests/)
from safetensors.torch import load_file  # noqa: E402
from tiny_huggingface import ours_of, perturb  # noqa: E402
from tuned_products import parity_on_cpu  # noqa: E402

import fourfold  # noqa: E402
from fourfold.config.run import ParallelConfig, RunConfig  # noqa: E402
from fourfold.data.tokenizer import train_bpe  # noqa: E402
from fourfold.errors import UserError, first_line  # noqa: E402
from fourfold.huggingface.architectures.config_json import model_of, read_config  # noqa: E402
from fourfold.huggingface.export_model import export_huggingface  # noqa: E402
from fourfold.huggingface.import_model import import_huggingface  # noqa: E402
from fourfold.inference.loki import LokiConfig, calibrate, enable_loki  # noqa: E402
from fourfold.parallel.grid.grid import Grid  # noqa: E402
from fourfold.parallel.state import gather_full  # noqa: E402
from fourfold.planning.calibration.machine_constants import constants_for  # noqa: E402
from fourfold.planning.machines.machine import load_machine  # noqa: E402
from fourfold.planning.run_workload import workload_of_model  # noqa: E402
from fourfold.planning.search.plan import make_plan  # noqa: E402
from fourfold.run_file.load import make_run  # noqa: E402
from fourfold.verification.parity_report import ParityReport  # noqa: E402

PAGE = HERE / "model-types.md"
SIZES: dict[str, Any] = {
    "vocab_size": 288, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 64, "head_dim": 8, "initializer_range": 0.2,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 48, "num_mtp_layers": 0, "rotary_dim": 8,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "n_shared_experts": 1, "num_kv_heads": 4, "new_decoder_architecture": True,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "full_attention_interval": 2,
}  # fmt: skip
"""Sizes of a tiny model. Each config class ignores the keys that it does not have."""
LATENT = {"num_key_value_heads": 8, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
"""Other sizes for models with latent attention. Such models need as many key-value heads as query heads. The keys for
experts replace DeepSeek's defaults, which do not work with so few layers and experts."""
LEFT_OUT: tuple[set[str], ...] = (set(), {"head_dim"}, {"num_key_value_heads"}, {"num_hidden_layers"}, {"v_head_dim"})
"""Some config classes do not accept all keys of ``SIZES``. The script leaves out one of these sets of keys after
another, until the class accepts the remaining keys."""
MOST_PARAMETERS = 30_000_000
LIMIT = 2e-4
"""Largest allowed difference from the library, relative to the norm of a tensor. For comparison, in a deep recurrent
model (hrm_text), the library's float32 gradients differ from its float64 gradients by 6e-5."""
OK, ERROR = "ok", "ERROR"
COLUMNS = ("import", "export", "train and generate", "plan", "parallelize", "packed documents", "Loki")


@dataclass
class Row:
    """The results for one model type. For each column, ``ok`` or the message that says what does not work."""

    kind: str
    cells: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        shown = [self.cells.get(column, "–") for column in COLUMNS]
        return f"| `{self.kind}` | " + " | ".join(each if each in (OK, "–") else "no" for each in shown) + " |"

    def reasons(self) -> list[tuple[str, str]]:
        """Return (column, message) for each refusal. The messages are shortened, so that they are equal for many
        types."""
        return [(column, shortened(text, self.kind)) for column, text in self.cells.items() if text != OK]


def shortened(text: str, kind: str) -> str:
    """Shorten a message: remove the advice at its end, and the names of the type and its class."""
    text = re.sub(r"; (there are|supported are|give parallelize a table) .*", "", text)
    return re.sub(r"^\w+(?= publishes no)", "…", text.replace(f"'{kind}'", "…"))


def config_of(kind: str) -> Any:
    """Return the configuration of a tiny model of this type.

    Raises:
        ValueError: The config class accepts none of the sizes, or the model has more than a text decoder.
    """
    made = transformers.CONFIG_MAPPING[kind]()
    if "text_config" in made.sub_configs or getattr(made, "is_encoder_decoder", False):
        raise ValueError("it has an encoder or reads images or sound; only its text part could be trained")
    sizes = SIZES | (LATENT if hasattr(made, "kv_lora_rank") else {})
    problem: Exception | None = None
    for left_out in LEFT_OUT:
        try:
            config = transformers.CONFIG_MAPPING[kind](**{key: sizes[key] for key in sizes if key not in left_out})
            for key, value in list(vars(config).items()):
                if ("drop" in key or "jitter" in key) and isinstance(value, float):
                    setattr(config, key, 0.0)
            if hasattr(config, "is_decoder"):
                config.is_decoder = True
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
            if sum(parameter.numel() for parameter in model.parameters()) < MOST_PARAMETERS:
                return config
            problem = ValueError("it has no sizes that make it small")
        except Exception as error:  # Config classes raise many types of errors.
            problem = error
    assert problem is not None
    raise ValueError(first_line(problem))


def make(kind: str) -> Any:
    """Return a random model of a type, with the same weights in every process."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind))
    perturb(model)
    return model


def called(model: Any, **given: Any) -> Any:
    """Call a model, without a key-value cache if the model has one."""
    taken = inspect.signature(model.forward).parameters
    takes_cache = "use_cache" in taken or any(each.kind is each.VAR_KEYWORD for each in taken.values())
    return model(**given, **({"use_cache": False} if takes_cache else {}))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels, both [4, 16]. Each row of the labels has a different number of masked tokens."""
    tokens = torch.randint(4, 200, (4, 16), generator=torch.Generator().manual_seed(6))
    labels = tokens.clone()
    for row in range(4):
        labels[row, : row + 2] = -100
    return tokens, labels


def parallelized(rank: int, world_size: int, kind: str) -> tuple[float, dict[str, torch.Tensor] | None, str]:
    """Parallelize a model on x = 2 and z = 2. Return its loss, its gradients, and the result for packed documents:
    ``ok``, or fourfold's error message if it refuses them."""
    model = fourfold.parallelize(make(kind).train(), Grid(ParallelConfig(x=2, z=2), "cpu"))
    tokens, labels = batch()
    loss = model(input_ids=model.rows(tokens), labels=model.rows(labels)).loss
    model.backward(loss)
    with_gradient = [(shard, shard.grad) for shard in model.shards if shard.grad is not None]
    gradients = gather_full([shard for shard, _ in with_gradient], [gradient for _, gradient in with_gradient])
    positions = torch.cat([torch.arange(7), torch.arange(9)]).expand(4, 16)
    try:
        with torch.no_grad():
            model(input_ids=model.rows(tokens), position_ids=model.rows(positions), labels=model.rows(labels))
    except UserError as error:
        return float(loss), gradients, str(error)
    except TypeError:
        return float(loss), gradients, "the model takes no position_ids"
    return float(loss), gradients, OK


def check_parallelized(row: Row, pool: Pool, kind: str) -> None:
    model, (tokens, labels) = make(kind).train(), batch()
    expected = called(model, input_ids=tokens, labels=labels).loss
    expected.backward()
    loss, gradients, packed = pool.run(4, parallelized, kind)[0]
    assert gradients is not None
    check(torch.tensor(loss), expected.detach(), "the loss")
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            check(gradients[name].view_as(parameter), parameter.grad, f"the gradient of {name}")
    row.cells |= {"parallelize": OK, "packed documents": packed}


def check(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    error = ((found.double() - expected.double()).norm() / expected.double().norm()).item()
    assert error < LIMIT, f"{what} is {error:.1e} off"


def check_import(row: Row, folder: Path, kind: str) -> None:
    """Import a model, compare its logits with the library's logits, and check that an export has bit-identical
    tensors."""
    model, (tokens, _) = make(kind).eval(), batch()
    with torch.no_grad():
        check(ours_of(folder)(tokens).float(), called(model, input_ids=tokens).logits, "a logit")
    import_huggingface(str(folder), folder.parent / "imported")
    row.cells["import"] = OK
    export_huggingface(folder.parent / "imported", folder.parent / "exported")
    files = [{n: t for f in sorted(each.glob("*.safetensors")) for n, t in load_file(f).items()}
             for each in (folder, folder.parent / "exported")]  # fmt: skip
    assert files[0].keys() == files[1].keys(), "the export has other names"
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0]), "the export has other values"
    row.cells["export"] = OK


def run_of(folder: Path) -> RunConfig:
    """Return a run that trains the model in a folder on the grid x = 2."""
    train_bpe(["def main():\n    return 0\n" * 9, "zwei Äpfel 東京"], 280, folder / "tokenizer.json")
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    # Load the tokenizer with transformers and save it again. For some types, transformers changes a tokenizer's rules
    # when it loads the tokenizer. The files on the Hub already have the changed rules.
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    training = {"micro_batch_size": 2, "global_batch_size": 4, "seq_length": 16, "train_steps": 4, "seed": 1}
    return make_run({
        "name": "run", "output_dir": str(folder.parent), "data": {"train": [{"path": "nowhere"}]},
        "training": {**training, "device": "cpu"}, "parallel": {"x": 2}, "model": {"from_hf": str(folder)},
    })  # fmt: skip


def trained(rank: int, world_size: int, run: RunConfig) -> ParityReport | None:
    return parity_on_cpu(run, steps=1, against="transformers")


def check_training(row: Row, pool: Pool, folder: Path) -> None:
    """Compare a training step on x = 2, and the tokens that the model generates, with the library's results."""
    report = pool.run(2, trained, run_of(folder))[0]
    assert report.ok, "parity fails"
    assert report.deviations["imported"][-1].tensor == "tokens", "no tokens were generated"
    row.cells["train and generate"] = OK


def check_plan(row: Row, folder: Path) -> None:
    machine = load_machine("dgx-h100")
    model = model_of(read_config(folder), str(folder))
    work = workload_of_model(model)
    plan = make_plan(work.but(global_batch_size=64, seq_length=32), machine, constants_for(machine), 8)
    assert plan.best.seconds > 0
    row.cells["plan"] = OK


def check_loki(row: Row, kind: str) -> None:
    """Compare a decoding step with Loki that attends to all keys with a step of dense attention."""
    model, (tokens, _) = make(kind).eval(), batch()
    with torch.no_grad():
        expected = called(model, input_ids=tokens).logits
        basis = calibrate(model, tokens.tolist())
        enable_loki(model, basis, LokiConfig(d_f=1.0, k_f=1.0, min_k=1, min_seq=0))
        past = model(tokens[:, :-1], use_cache=True).past_key_values
        check(model(tokens[:, -1:], past_key_values=past).logits[:, -1], expected[:, -1], "a logit with Loki")
    row.cells["Loki"] = OK


def row_of(kind: str, pool: Pool) -> Row:
    """Check everything for one type. If fourfold raises a ``UserError``, it refuses the model. Any other exception is a
    bug in fourfold."""
    row = Row(kind)

    def attempt(column: str, work: Callable[[], None]) -> bool:
        try:
            work()
        except UserError as error:
            row.cells[column] = str(error)
        except Exception as error:  # Record a bug of any kind, and continue with the next type.
            row.cells[column] = f"{ERROR} {type(error).__name__}: {first_line(error)}"
        return row.cells.get(column) == OK

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / kind
        try:
            called(make(kind).train(), input_ids=batch()[0], labels=batch()[1]).loss.backward()
            make(kind).save_pretrained(folder)
        except Exception as error:  # The library's classes and models raise many types of errors.
            row.cells["parallelize"] = f"the script found no tiny model of this type that runs: {first_line(error)}"
            return row
        if attempt("import", lambda: check_import(row, folder, kind)):
            attempt("train and generate", lambda: check_training(row, pool, folder))
            attempt("plan", lambda: check_plan(row, folder))
        else:
            row.cells["import"] = row.cells["import"].split(f"{folder}: ")[-1].split(f"{folder}/config.json: ")[-1]
    attempt("parallelize", lambda: check_parallelized(row, pool, kind))
    attempt("Loki", lambda: check_loki(row, kind))
    return row


def page_of(rows: list[Row]) -> str:
    counts = {column: sum(row.cells.get(column) == OK for row in rows) for column in COLUMNS}
    head = f"| type | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}"
    totals = "| " + " | ".join(["**ok**", *(str(counts[column]) for column in COLUMNS)]) + " |"
    types: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for reason in row.reasons():
            types.setdefault(reason, []).append(f"`{row.kind}`")
    reasons = [f"| {column} | {text} | {', '.join(types[column, text])} |" for column, text in sorted(types)]
    return re.sub(
        r"\n{3,}",
        "\n\n",
        f"""# Every model type of transformers

Look up here what fourfold can do with your model. [Supported Hugging Face models](huggingface-models.md) lists the
conditions for each type that `fourfold train` can import.

For each of the {len(rows)} causal language models of transformers {transformers.__version__}, `python
docs/model_types.py` builds a tiny random model and runs these checks:

- *import*: `fourfold checkpoint import-hf` reads the model. fourfold and transformers compute the same logits.
- *export*: `fourfold checkpoint export-hf` writes the imported model again, with the same tensors, bit for bit.
- *train and generate*: `fourfold train` takes a step on two processes, and the model generates tokens. Both results
  equal the results of transformers.
- *plan*: `fourfold plan` finds a layout.
- *parallelize*: `fourfold.parallelize` on four processes computes the same loss and gradients as transformers.
- *packed documents*: in the parallelized model, a packed document does not see the documents before it.
- *Loki*: a decoding step with [Loki](loki.md) that attends to all keys computes the same logits as dense attention.

"ok" means that the check succeeded, with an error of at most {LIMIT:g} of each tensor's norm. "no" means that the check
failed, and the table of [messages](#messages) says why. "–" means that the check could not run, for example because
the import failed.

{head}
{chr(10).join(row.line() for row in rows)}
{totals}

## Messages

| column | message | types |
|---|---|---|
{chr(10).join(reasons)}
""",
    )


def main(kinds: list[str]) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    rows = []
    with closing(Pool()) as pool:
        for kind in kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
            rows.append(row_of(kind, pool))
            print(rows[-1].line(), *map(": ".join, rows[-1].reasons()), sep="\n  ", flush=True)
    errors = [row.kind for row in rows if any(text.startswith(ERROR) for text in row.cells.values())]
    if errors:
        sys.exit(f"errors: {', '.join(errors)}")
    if not kinds:
        PAGE.write_text(page_of(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
