"""Configurations of other programs: what is read, what is predicted, and which files are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron_configurations import LLAMA_FP8, MIXTRAL_SCRIPT, Configuration
from other_configurations import CONFIGURATIONS, FACTORY, TITAN_8B
from setting_meanings import MEANINGS

from fourfold.config.model import ModelConfig
from fourfold.config.presets import PRESETS
from fourfold.errors import UserError
from fourfold.planning.calibration.columns import MeasuredRow
from fourfold.planning.calibration.machine_constants import constants_for
from fourfold.planning.calibration.programs import PROGRAMS
from fourfold.planning.other_programs.other_run import best_in_program, read_other_run
from fourfold.planning.other_programs.program_settings import TABLES, read_program
from fourfold.planning.search.limits import parse_limits
from fourfold.planning.search.plan import predict

H100 = {"machine": "dgx-h100"}


def written(folder: Path, configuration: Configuration) -> Path:
    """Write a configuration and the other files in its folder. Return the configuration's path."""
    for name, text in {**configuration.beside, configuration.name: configuration.text}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / configuration.name


def saved(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda configuration: configuration.name)
def test_public_configurations_have_the_values_that_their_programs_use(
    tmp_path: Path, configuration: Configuration
) -> None:
    row, _, lists = read_program(written(tmp_path, configuration), {**H100, **configuration.given})
    assert {name: getattr(row, name) for name in configuration.columns} == configuration.columns
    assert tuple(lists["not_understood"]) == configuration.not_understood
    read = {text.partition(" = ")[0] for text in lists["read"]}
    assert read.isdisjoint(text.partition(" = ")[0] for text in lists["assumed"]) and {"layers", "gpus"} <= read


@pytest.mark.parametrize(("name", "text", "columns", "not_understood"), MEANINGS, ids=lambda value: str(value)[:60])
def test_settings_and_defaults_have_the_meaning_that_their_programs_give_them(
    tmp_path: Path, name: str, text: str, columns: dict[str, Any], not_understood: tuple[str, ...]
) -> None:
    sizes = {"layers": "32", "hidden": "4096", "heads": "32"}
    given = {column: value for column, value in sizes.items() if column not in columns}
    row, _, lists = read_program(saved(tmp_path, name, text), {**H100, "gpus": "64", **given})
    assert {column: getattr(row, column) for column in columns} == columns
    assert tuple(lists["not_understood"]) == not_understood


def test_every_setting_is_in_a_list_or_changes_a_column(tmp_path: Path) -> None:
    text = TITAN_8B.text + "mystery = 3\n[unheard_of]\nkey = 'value'\n"
    _, _, lists = read_program(saved(tmp_path, "a.toml", text), {**H100, "gpus": "8"})
    assert {"float8.mystery = 3", "unheard_of.key = value"} <= set(lists["not_understood"])
    assert {"optimizer.lr", "job.description"} <= set(lists["without_effect"])


def test_an_unknown_value_of_a_known_setting_is_not_understood(tmp_path: Path) -> None:
    file = saved(tmp_path, "a.toml", TITAN_8B.text.replace('mode = "selective"', 'mode = "memory_budget"'))
    assert (
        "activation_checkpoint.mode = memory_budget" in read_program(file, {**H100, "gpus": "8"})[2]["not_understood"]
    )


def row_of(folder: Path, text: str, name: str = "a.sh", gpus: int = 16) -> MeasuredRow:
    return read_program(saved(folder, name, text), {**H100, "gpus": str(gpus)})[0]


def test_formulas_compute_what_a_file_leaves_out(tmp_path: Path) -> None:
    options = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --micro-batch-size 2 "
    gated = row_of(tmp_path, options + "--swiglu")
    assert (gated.ffn_hidden, gated.global_batch, gated.vocab) == (2688, 32, 50304)
    experts = options + "--swiglu --num-experts 4 --moe-layer-freq "
    assert [row_of(tmp_path, experts + freq).dense_layers for freq in ("1", "2", "3", "'([0]*3+[1]*5)'")] == [
        0,
        4,
        5,
        3,
    ]
    latent = row_of(
        tmp_path,
        options
        + "--multi-latent-attention --kv-lora-rank 64 --qk-head-dim 48 --qk-pos-emb-head-dim 16 --v-head-dim 48",
    )
    assert (latent.head_dim, latent.qk_rope_head_dim, latent.v_head_dim) == (64, 16, 48)
    stages = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"
    assert row_of(tmp_path, options + stages).vpp == 2


MEGATRON = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --micro-batch-size 2 "
    "--global-batch-size 32 --bf16 "
)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--nnodes $SLURM_NNODES --nproc-per-node 8", "nnodes = $SLURM_NNODES is not a number"),
        ("--tensor-model-parallel-size 3", "gpus /tp /pp /cp is not a whole number (gpus = 8, tp = 3, pp = 1, cp = 1)"),
        ("--num-experts 6 --expert-model-parallel-size 4", "experts /ep is not a whole number"),
        ("--global-batch-size 101", "global_batch /micro_batch /copies is not a whole number"),
        ("--num-experts 4 --moe-layer-freq '([1]*3+[0]*1)*2'", "is not a pattern of layers, such as"),
    ],
)
def test_values_that_cannot_be_true_are_refused(tmp_path: Path, options: str, words: str) -> None:
    given = {} if "nnodes" in options else {"gpus": "8"}
    with pytest.raises(UserError) as error:
        read_program(saved(tmp_path, "a.sh", MEGATRON + options), {"machine": "dgx-h100", **given})
    assert words in str(error.value)


def test_contradicting_settings_are_refused(tmp_path: Path) -> None:
    json = saved(tmp_path, "zero.json", '{"zero_optimization": {"stage": 3}, "train_batch_size": 256}')
    script = "--model_max_length 512 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --nproc_per_node 8"
    script = f"{script} --model_name_or_path meta-llama/Llama-3.1-8B --deepspeed {json.name}"
    with pytest.raises(UserError, match=r"global_batch = 256, but local_batch · copies = 64"):
        read_program(saved(tmp_path, "a.sh", script), {"machine": "dgx-h100"})


def test_an_option_that_needs_a_flag_has_no_effect_without_it(tmp_path: Path) -> None:
    file = saved(tmp_path, "a.sh", MEGATRON + "--num-query-groups 4")
    row, _, lists = read_program(file, H100 | {"gpus": "8"})
    assert row.kv_heads in (None, row.heads) and "num_query_groups" in lists["without_effect"]
    assert row_of(tmp_path, MEGATRON + "--num-query-groups 4 --group-query-attention").kv_heads == 4


def test_a_flag_does_not_take_a_variable_as_its_value(tmp_path: Path) -> None:
    row = row_of(tmp_path, MEGATRON + '--swiglu $EXTRA_ARGS --use-distributed-optimizer "$@"')
    assert (row.mlp, row.sharding) == ("swiglu", "zero1")


def test_a_script_with_several_commands_on_a_line(tmp_path: Path) -> None:
    row = row_of(tmp_path, f"TP=2; PP=4\ntorchrun {MEGATRON} --tensor-model-parallel-size $TP; echo done")
    assert row.tp == 2


def test_an_option_that_is_given_twice_is_listed(tmp_path: Path) -> None:
    text = f"python pretrain.py {MEGATRON}\npython serve.py --seq-length 1024 --micro-batch-size 4"
    _, _, lists = read_program(saved(tmp_path, "a.sh", text), H100 | {"gpus": "8"})
    assert "--seq-length 512 (a later value replaces it)" in lists["conditions_not_checked"]


def test_a_column_that_is_computed_from_a_default_is_assumed(tmp_path: Path) -> None:
    _, _, lists = read_program(saved(tmp_path, "a.sh", MEGATRON), H100 | {"gpus": "8"})
    assert any(text.startswith("vocab =") for text in lists["assumed"])


def test_a_script_of_nested_variables_stays_small(tmp_path: Path) -> None:
    text = f"A={'$A' * 1000}\nB={'$A' * 1000}\nC={'$B' * 1000}\n{MEGATRON} --tokenizer-model $C"
    assert row_of(tmp_path, text).layers == 8


def test_torchtitan_divides_its_batch_over_ranks_and_pipeline_micro_batches(tmp_path: Path) -> None:
    sharded = TITAN_8B.text.replace("replicate_degree = 1", "replicate_degree = 2").replace("= -1", "= 4")
    row, _, _ = read_program(saved(tmp_path, "a.toml", sharded), H100)
    assert (row.gpus, row.shard_group, row.global_batch) == (8, 4, 8)
    piped = TITAN_8B.text.replace("pipeline_parallel_degree = 1", "pipeline_parallel_degree = 2")
    row = row_of(tmp_path, piped.replace("batch_size = 1", "batch_size = 4"), "a.toml")
    assert (row.micro_batch, row.global_batch) == (1, 32)


def test_options_replace_the_values_of_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, LLAMA_FP8)
    mistral = ModelConfig.model_validate(PRESETS["mistral-7b"])
    row, model, _ = read_program(file, {**H100, "gpus": "16", "seq_len": "1024", "precision": "bf16"}, mistral)
    assert (row.gpus, row.seq_len, row.precision, row.vocab, row.sliding_window) == (16, 1024, "bf16", 32000, 4096)
    assert model == mistral


def test_a_model_without_a_preset_is_made_from_the_sizes(tmp_path: Path) -> None:
    _, model, _ = read_program(written(tmp_path, MIXTRAL_SCRIPT), {**H100, "gpus": "64"})
    assert (model.num_hidden_layers, model.num_experts, model.mlp, model.tie_word_embeddings) == (
        32,
        8,
        "swiglu",
        False,
    )
    assert (model.vocab_size, model.num_key_value_heads, model.moe_intermediate_size) == (50304, 8, 14336)


def test_the_measured_step_moves_the_prediction_to_the_measurement(tmp_path: Path) -> None:
    file = written(tmp_path, FACTORY)
    before = read_other_run(file, {**H100, "gpus": "8"}, None)
    assert before.interval is not None and before.machine.efficiency == ()
    run = read_other_run(file, {**H100, "gpus": "8", "step_seconds": str(1.2 * before.predicted)}, None)
    assert run.predicted == before.predicted and run.record()["measured_seconds"] == pytest.approx(1.2 * run.predicted)
    fitted = predict(run.own.work, run.machine, constants_for(run.machine))
    assert fitted.seconds == pytest.approx(1.2 * before.predicted, rel=0.05)


def test_the_best_layout_of_a_program_is_one_that_the_program_has(tmp_path: Path) -> None:
    best = best_in_program(read_other_run(written(tmp_path, FACTORY), {**H100, "gpus": "8"}, None), [])
    assert best is not None
    layout = best.work.layout
    assert (layout.x, layout.y, layout.pp, layout.cp, layout.dp) == (1, 1, 1, 1, 8) and layout.zero in (1, 2, 3)
    assert not best.work.program.is_fourfold
    assert best_in_program(read_other_run(tmp_path / FACTORY.name, {**H100, "gpus": "8"}, None), ["dp=4"]) is None


def test_tables_name_columns_presets_and_programs_that_exist() -> None:
    assert set(TABLES["presets"].values()) <= set(PRESETS)
    assert set(TABLES["search"]) <= set(PROGRAMS)
    programs = {table["defaults"]["program"] for table in TABLES["programs"].values()} | {"deepspeed", "nemo"}
    assert programs <= set(TABLES["search"])
    for searches in TABLES["search"].values():
        for search in searches:
            parse_limits([*search["limits"], *search.get("of_experts", [])])


DEEP = "a: " + "[" * 1000 + "]" * 1000
BOMB = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1, 40))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "a: !!python/object/apply:os.system ['touch pwned']", "not a table of settings"),
        ("a.yaml", BOMB, "has no settings such as"),
        ("a.yaml", "a: &a\n  b: *a", "not a table of settings"),
        ("a.yaml", DEEP, "not a table of settings"),
        ("a.yaml", "- 1\n- 2", "not a table of settings"),
        ("a.yaml", "b: 1\na: [1", "line 2, column 4"),
        ("a.yaml", "1: 2", "not a table of settings"),
        ("a.toml", "a = ", "not a table of settings"),
        ("a.json", "{", "not a table of settings"),
        ("a.json", "[]", "not a table of settings"),
        ("a.sh", "echo 'unclosed", "not a table of settings"),
        ("a.sh", "ls -l", "has no settings such as"),
        ("a.sh", "--lr 1", "belongs to no known program"),
        ("a.sh", "--num-layers 8 --hidden-size 64", "add --machine --gpus"),
        ("a.sh", "--num-layers 8 --tensor-model-parallel-size x", "tensor_model_parallel_size = x is not a number"),
        ("a.yaml", "model_name_or_path: a/b\nper_device_train_batch_size: 1", "of a/b; add --model --machine --gpus"),
        ("a.yaml", FACTORY.text, "needs examples/deepspeed/zero3.json, which does not exist"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read_get_one_sentence(tmp_path: Path, name: str, text: str, words: str) -> None:
    file = saved(tmp_path, name, text)
    with pytest.raises(UserError) as error:
        read_program(
            file, H100 | {"gpus": "8", "seq_len": "64", "global_batch": "8"} if "not a number" in words else {}
        )
    assert words in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_deepspeed_configuration_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    saved(tmp_path, "zero3.json", "{}")
    (tmp_path / "runs").mkdir()
    for named in ("../zero3.json", str(tmp_path / "zero3.json")):
        text = FACTORY.text.replace("examples/deepspeed/zero3.json", named)
        with pytest.raises(UserError, match="does not exist; put it into"):
            read_program(saved(tmp_path / "runs", "a.yaml", text), {**H100, "gpus": "8"})


def test_runs_that_cannot_be_predicted_say_why(tmp_path: Path) -> None:
    lora = saved(tmp_path, "a.yaml", FACTORY.text.replace("full", "lora").replace("deepspeed:", "other:"))
    with pytest.raises(UserError, match=r"on 8 GPUs \(LoRA\)"):
        read_other_run(lora, {**H100, "gpus": "8"}, None)
    with pytest.raises(UserError, match=r"is not a whole number \(gpus = 2, tp = 1, pp = 4, cp = 1\)"):
        read_other_run(written(tmp_path, MIXTRAL_SCRIPT), {**H100, "gpus": "2"}, None)
    with pytest.raises(UserError, match="ep does not divide the GPUs"):
        read_other_run(written(tmp_path, MIXTRAL_SCRIPT), {**H100, "gpus": "16"}, None)
    with pytest.raises(UserError, match="machine"):
        read_other_run(written(tmp_path, MIXTRAL_SCRIPT), {"machine": "abacus", "gpus": "64"}, None)
