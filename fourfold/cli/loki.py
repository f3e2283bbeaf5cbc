"""`fourfold loki`: calibrate Loki attention, and measure how much quality it loses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option, Typer

from fourfold.cli import options
from fourfold.cli.options import TASK_LIST, AsJson, TaskFolder, TaskLimit, show
from fourfold.data.progress import working
from fourfold.errors import UserError, given_as

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fourfold.data.transformers_tokenizer import AnyTokenizer

loki = Typer(
    no_args_is_help=True,
    help="Long-context generation with low-rank keys: calibrate a model, and measure how much quality it loses.",
)

Texts = Annotated[list[Path], Option("--text", metavar="FILE", help="Plain text. Repeatable.")]
WindowLength = Annotated[
    int | None,
    Option("--seq-len", min=1, help="Number of tokens per window. Default: the model's positions, at most 2048."),
]
DEFAULT_LENGTH = 2048
HELD_OUT_EVERY = 10
"""`calibrate` uses one in this many windows of text to choose settings, and not to compute components."""


@loki.command()
def calibrate(
    model: options.ModelName,
    text: Texts,
    out: Annotated[Path, Option(metavar="BASIS.safetensors", help="The file to write.")],
    seq_len: WindowLength = None,
    tokens: Annotated[int, Option(min=1, help="Largest number of tokens to read.")] = 100_000,
    tolerance: Annotated[
        float,
        Option(min=0, max=100, help="Largest relative increase of the perplexity that the chosen settings may cause."),
    ] = 0.01,
    tokenizer: options.TokenizerName = None,
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Compute the principal components of a model's keys, choose Loki's settings, and save both as a basis for Loki.

    The command holds out every tenth window of text. On these windows, it looks for the cheapest settings that keep the
    perplexity close to dense attention. `fourfold generate --basis` uses these settings by default.

    Prints how many components explain 90 % of the variance in each layer, and the quality of the settings. Calibrate on
    text of the kind and length that you will generate from. A few tens of thousands of tokens are enough.

    Example: fourfold loki calibrate --model exported --text book.txt --out basis.safetensors
    """
    from fourfold.data.atomic_files import check_writable
    from fourfold.huggingface.export_model import as_huggingface
    from fourfold.inference.loki import calibrate as find_basis
    from fourfold.inference.loki import choose_settings
    from fourfold.reports.loki_report import calibration_tables

    check_writable(out, "--out", "basis.safetensors")
    with as_huggingface(model) as names:
        opened, _, windows = _open(names, tokenizer, dtype, device, text, seq_len, tokens)
        # Count from the end, so that at least the last window is held out.
        held_out = range(len(windows))[::-HELD_OUT_EVERY]
        with working("Calibrating"):
            found = find_basis(opened, [window for number, window in enumerate(windows) if number not in held_out])
            found = choose_settings(opened, [windows[number] for number in held_out], found, tolerance)
    found.save(out)
    record = {"basis": str(out), "model": model, **found.record()}
    show(record, as_json, calibration_tables)


@loki.command()
def evaluate(
    model: options.ModelName,
    basis: Annotated[Path, Option(metavar="BASIS.safetensors", help="The file that `fourfold loki calibrate` wrote.")],
    text: Texts = [],  # noqa: B006 (typer only reads it)
    seq_len: WindowLength = None,
    windows: Annotated[int, Option(min=1, help="Largest number of windows of text to read.")] = 16,
    loki_values: options.LokiValues = [],  # noqa: B006
    tasks: Annotated[
        str,
        Option(metavar="gsm8k,…", help=f"Tasks of lm-eval, to run with dense attention and with Loki; {TASK_LIST}"),
    ] = "",
    limit: TaskLimit = None,
    include_path: TaskFolder = None,
    tokenizer: options.TokenizerName = None,
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Measure how much quality Loki loses on a text: which fraction of the best keys it finds, how much of the
    attention these keys capture, and how the perplexity changes.

    Compares Loki with dense attention, with the true top-k keys (which Loki approximates), and with random directions
    (the control). --tasks also runs lm-eval tasks. Only tasks that generate text run the decoding kernels.

    Example: fourfold loki evaluate --model exported --basis basis.safetensors --text held_out.txt --loki d=32
    """
    if not text and not tasks:
        raise UserError("--text and --tasks are missing; give one of them, such as --text held_out.txt")
    on_text, in_tasks = options.loki_config(loki_values, min_k=1, min_seq=0), options.loki_config(loki_values)
    from fourfold.huggingface.export_model import as_huggingface
    from fourfold.inference.lm_eval_tasks import checked_tokenizer, task_names
    from fourfold.inference.loki import LokiBasis
    from fourfold.inference.loki.quality import compare_tasks, measure_quality
    from fourfold.reports.loki_report import loki_tables

    names = task_names(tasks)
    with given_as("--basis"):
        ranked_by = LokiBasis.load(basis)
    record: dict[str, Any] = {"model": model, "basis": str(basis)}
    with as_huggingface(model) as folders:
        opened, own, found = _open(folders, tokenizer, dtype, device, text, seq_len, None)
        for_tasks = checked_tokenizer(own) if names else None
        if text:
            with working("Evaluating"):
                record |= measure_quality(opened, found[:windows], ranked_by, on_text)
        if for_tasks is not None:
            record["tasks"] = compare_tasks(opened, for_tasks, ranked_by, in_tasks, names, limit, include_path)
    show(record, as_json, loki_tables)


def _open(
    names: tuple[str, str | None],
    tokenizer: str | None,
    dtype: str,
    device: str | None,
    files: list[Path],
    length: int | None,
    max_tokens: int | None,
) -> tuple[PreTrainedModel, AnyTokenizer, list[list[int]]]:
    """Load a model and its tokenizer, and cut the tokenized files into windows. Return the model, the tokenizer, and
    the windows, in this order. ``names`` has the folders of the model and of the model's own tokenizer."""
    from fourfold.data.transformers_tokenizer import load_any_tokenizer
    from fourfold.huggingface.transformers_models import checked_ids, load_model, positions_of
    from fourfold.inference.text import token_windows

    text = load_any_tokenizer(tokenizer or names[1])
    model = load_model(names[0], dtype, device)
    positions = positions_of(model)
    length = length or min(DEFAULT_LENGTH, positions or DEFAULT_LENGTH)
    if positions is not None and length > positions:
        raise UserError(
            f"--seq-len {length} is longer than the model's {positions} positions; --seq-len {positions} works"
        )
    windows = token_windows(text, files, length, max_tokens) if files else []
    for window in windows:
        checked_ids(model, window)
    return model, text, windows
