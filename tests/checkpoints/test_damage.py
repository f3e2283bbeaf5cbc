"""Damage to a checkpoint is found before anything is loaded, and reported in a sentence that names the file."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from pool import Pool
from safetensors import safe_open
from safetensors.torch import save_file
from saved_jobs import equal, new_job, save, tensors_of, train
from tiny_runs import LLAMA, tiny_run

from fourfold.checkpoints.checkpoint import Checkpointer, load_checkpoint
from fourfold.checkpoints.compatible import check_same_model
from fourfold.checkpoints.file_layout import LAYOUT_FILE
from fourfold.checkpoints.find_checkpoints import STATE_FILE
from fourfold.checkpoints.integrity import DamagedCheckpoint, seal
from fourfold.checkpoints.saved_state import read_state
from fourfold.config.run import CheckpointConfig, RunConfig
from fourfold.errors import UserError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint of a tiny Llama after one step."""
    folder = tmp_path_factory.mktemp("checkpoints")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job = new_job(tiny_run())
        train(job, range(1))
        return save(job, folder, 1)
    finally:
        dist.destroy_process_group()


def shard_of(path: Path) -> Path:
    return next(iter(sorted(path.glob("*.safetensors"))))


def change_state(**changes: Any) -> Callable[[Path], object]:
    """Change keys of the saved state and recompute the checksums, as if another program had written the state."""

    def change(path: Path) -> None:
        state = json.loads((path / STATE_FILE).read_text())
        (path / STATE_FILE).write_text(json.dumps({**state, **changes}))
        reseal(path)

    return change


def reseal(path: Path) -> None:
    for manifest in path.glob("manifest-*.json"):
        manifest.unlink()
    seal(path)


def change_model(**changes: Any) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        state = json.loads((path / STATE_FILE).read_text())
        change_state(model={**state["model"], **changes})(path)

    return change


def make_pipe(file: Path) -> None:
    """Replace the file by a named pipe. Reading it would wait forever for a writer."""
    file.unlink()
    os.mkfifo(file)


def endless_size(path: Path) -> None:
    content = manifest_of(path).read_bytes().replace(b'"size": ', b'"size": 1e999, "was": ')
    manifest_of(path).unlink()
    (path / f"manifest-{xxhash.xxh3_128_hexdigest(content)}.json").write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(shard_of(path), shard_of(path).stat().st_size - 8)


def scramble_header(path: Path) -> None:
    with shard_of(path).open("r+b") as file:
        file.seek(20)
        file.write(b"\xff" * 40)


def scramble_header_size(path: Path) -> None:
    with shard_of(path).open("r+b") as file:
        file.write(b"\xff" * 8)


def manifest_of(path: Path) -> Path:
    (manifest,) = path.glob("manifest-*.json")
    return manifest


def link(path: Path) -> None:
    shard, elsewhere = shard_of(path), path.parent / "elsewhere"
    shard.rename(elsewhere)
    shard.symlink_to(elsewhere)


def name_outside(path: Path) -> None:
    entries = json.loads(manifest_of(path).read_text())
    entries["../step_1/state.json"] = entries["state.json"]
    content = json.dumps(entries).encode()
    manifest_of(path).unlink()
    (path / f"manifest-{xxhash.xxh3_128_hexdigest(content)}.json").write_bytes(content)


def halve_tensors(path: Path) -> None:
    """Write files with valid checksums but half of each tensor."""
    shard = shard_of(path)
    with safe_open(shard, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:32].clone()
    save_file(tensors, shard, metadata)
    reseal(path)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda path: shard_of(path).unlink(), "it is missing"),
    "truncated shard": (truncate, "were written"),
    "unlisted shard": (
        lambda path: shutil.copy(shard_of(path), path / "more.safetensors"),
        "it is not in the manifest",
    ),
    "linked shard": (link, "it is a link"),
    "no manifest": (lambda path: manifest_of(path).unlink(), "it has no manifest"),
    "two manifests": (
        lambda path: shutil.copy(manifest_of(path), path / "manifest-0.json"),
        "it has several manifests",
    ),
    "changed manifest": (
        lambda path: manifest_of(path).write_text("{}"),
        "its checksum differs from the one in its name",
    ),
    "a file outside": (name_outside, "it names a file outside the checkpoint, ../"),
    "changed step": (
        lambda path: (path / STATE_FILE).write_text((path / STATE_FILE).read_text().replace('"step": 1', '"step": 2')),
        "state.json is damaged: its content is not what was written",
    ),
    "changed format": (
        lambda path: (path / STATE_FILE).write_text(
            (path / STATE_FILE).read_text().replace('"format": 3', '"format": 7')
        ),
        "state.json is damaged: its content is not what was written",
    ),
    "added file": (
        lambda path: (path / "more.json").write_text("{}"),
        "more.json is damaged: it is not in the manifest",
    ),
    "added folder": (lambda path: (path / "more").mkdir(), "more is damaged: it is not in the manifest"),
    "content of another step": (change_state(step=2), "step_1 is damaged: it has the content of step 2"),
    "a pipe": (lambda path: make_pipe(path / STATE_FILE), "state.json is damaged: it is missing, or it is not a file"),
    "a pipe as manifest": (lambda path: make_pipe(manifest_of(path)), "it is a link or a folder"),
    "a size without end": (endless_size, "it is not a list of files"),
    "scrambled header": (scramble_header, "is damaged"),
    "scrambled header size": (scramble_header_size, "is damaged"),
    "a tensor of half its size": (halve_tensors, "it does not hold model.norm.weight as the layout says"),
    "no state": (lambda path: (path / STATE_FILE).unlink(), "state.json is damaged: it is missing"),
    "garbage": (lambda path: (path / STATE_FILE).write_bytes(b"\x00\xff garbage"), "state.json is damaged"),
    "cut short": (lambda path: os.truncate(path / STATE_FILE, 100), "state.json is damaged"),
    "a list": (lambda path: (path / STATE_FILE).write_text("[1]"), "state.json is damaged"),
    "null": (lambda path: (path / STATE_FILE).write_text("null"), "state.json is damaged"),
    "step of a wrong type": (change_state(step="ten"), "state.json is damaged"),
    "step of another wrong type": (change_state(step=1.5), "state.json is damaged"),
    "negative step": (change_state(step=-1), "state.json is damaged"),
    "model of a wrong type": (change_state(model=[1]), "state.json is damaged"),
    "random state that is none": (change_state(rng="?"), "state.json is damaged"),
    "random state of another size": (change_state(rng="AAAA"), "state.json is damaged"),
    "random state of a wrong type": (change_state(rng=[1, 2]), "state.json is damaged"),
    "unknown key": (change_state(color="blue"), "state.json is damaged"),
    "newer format": (change_state(format=4, anything=1), "has checkpoint format 4; this version of fourfold reads 3"),
    "format of a wrong type": (change_state(format="1"), "state.json is damaged"),
    "other width": (
        change_model(hidden_size=128),
        "its model.hidden_size is 128, but the run file has 64",
    ),
    "other depth": (change_model(num_hidden_layers=3), "another model: its model.num_hidden_layers is 3"),
    "other base": (change_model(rope_theta=5e5), "another model: its model.rope_theta is 500000.0"),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_reported(saved: Path, tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "step_1"
    shutil.copytree(saved, path)
    damage(path)
    job = new_job(tiny_run())
    before = tensors_of(job)
    generator = torch.get_rng_state()
    with pytest.raises(UserError) as error:
        load_checkpoint(path, job)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    assert equal(tensors_of(job), before)
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.usefixtures("alone")
def test_a_shard_without_a_tensor_is_reported(saved: Path, tmp_path: Path) -> None:
    """Sizes and checksums are right, but a tensor has another name in the file than in the layout."""
    path = tmp_path / "step_1"
    shutil.copytree(saved, path)
    content = shard_of(path).read_bytes()
    shard_of(path).write_bytes(content.replace(b'"model.norm.weight"', b'"model.morn.weight"'))
    reseal(path)
    with pytest.raises(DamagedCheckpoint, match=r"does not hold model\.norm\.weight as the layout says"):
        load_checkpoint(path, new_job(tiny_run()))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_every_flipped_bit_is_found(saved: Path, tmp_path: Path, seed: int) -> None:
    """Flip a bit at 20 random places of every file."""
    draw, job = random.Random(seed), new_job(tiny_run())
    path = tmp_path / "step_1"
    shutil.copytree(saved, path)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for _ in range(20):
            place, bit = draw.randrange(len(whole)), draw.randrange(8)
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            with pytest.raises(DamagedCheckpoint, match=re.escape(f"{file} is damaged")):
                load_checkpoint(path, job)
        file.write_bytes(whole)
    assert load_checkpoint(path, job) == 1


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("harm", ["cut", "grown", "of another step", "gone", "linked"])
def test_damage_to_any_file_is_found(saved: Path, tmp_path: Path, harm: str) -> None:
    """The error names the damaged file. If a JSON file is missing, the error names the folder."""
    job = new_job(tiny_run())
    train(job, range(2))
    other, path = save(job, tmp_path, 2), tmp_path / "step_1"
    kinds = {file.suffix for file in saved.iterdir()}
    assert kinds == {".json", ".safetensors"}
    for name in sorted(file.name for file in saved.iterdir()):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(saved, path)
        file, content = path / name, (path / name).read_bytes()
        if harm == "of another step" and name == LAYOUT_FILE:
            assert (other / name).read_bytes() == content  # every step has the same file
            continue
        match harm:
            case "cut":
                os.truncate(file, len(content) - 1)
            case "grown":
                file.write_bytes(content + b"\0")
            case "of another step":
                (manifest,) = other.glob("manifest-*.json")
                shutil.copy(manifest if name.startswith("manifest") else other / name, file)
            case "gone":
                file.unlink()
            case "linked":
                file.rename(tmp_path / name)
                file.symlink_to(tmp_path / name)
        named = path if name.endswith(".json") and harm == "gone" else file
        with pytest.raises(UserError, match=re.escape(str(named))):
            load_checkpoint(path, job)


def damaged_body(rank: int, world_size: int, run: RunConfig, folder: Path) -> str:
    try:
        load_checkpoint(folder, new_job(run))
    except DamagedCheckpoint as damage:
        return str(damage)
    return ""


def test_every_process_names_the_damage_that_one_found(pool: Pool, tmp_path: Path) -> None:
    run = tiny_run(LLAMA, {"z": 4})
    pool.run(4, save_body, run, tmp_path)
    path = tmp_path / "step_1"
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) == 4
    content = bytearray(shards[2].read_bytes())
    content[-5] ^= 64
    shards[2].write_bytes(content)
    told = pool.run(2, damaged_body, tiny_run(LLAMA, {"x": 2}), path)
    assert (
        told
        == [f"{shards[2]} is damaged: its content is not what was written (checksum); resume from another checkpoint"]
        * 2
    )


def save_body(rank: int, world_size: int, run: RunConfig, folder: Path) -> None:
    save(new_job(run), folder, 1)


def not_finite_body(rank: int, world_size: int, run: RunConfig, folder: Path) -> str:
    job = new_job(run)
    save(job, folder, 1)
    if rank == 1:
        job.shards[3].local.view(-1)[0] = math.inf
    with pytest.raises(UserError) as error:
        save(job, folder, 2)
    return str(error.value)


def test_weights_that_are_not_finite_are_not_saved(pool: Pool, tmp_path: Path) -> None:
    told = pool.run(2, not_finite_body, tiny_run(LLAMA, {"z": 2}), tmp_path)
    assert told[0] == told[1]
    assert re.match(r"model\.layers\.0\.\S+ is not finite on rank 1 after step 2; nothing was saved", told[0])
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


@pytest.mark.usefixtures("alone")
def test_settings_that_do_not_change_the_model_may_change(saved: Path) -> None:
    run = tiny_run({"initializer_range": 0.5, **LLAMA}, optimizer={"lr": 1.0, "weight_decay": 0.0})
    named = run.model.model_copy(update={"preset": None})
    job = new_job(run.model_copy(update={"model": named}))
    assert load_checkpoint(saved, job) == 1


def test_a_checkpoint_older_than_a_key_can_be_resumed(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / saved.name
    shutil.copytree(saved, path)
    state = json.loads((path / STATE_FILE).read_text())
    for key in ("parallel_residual", "partial_rotary_factor", "query_pre_attn_scalar"):
        del state["model"][key]
    change_state(model=state["model"])(path)
    model = tiny_run(LLAMA).model
    check_same_model(path, read_state(path), model)
    with pytest.raises(UserError, match=r"its model\.parallel_residual is False"):
        check_same_model(path, read_state(path), model.model_copy(update={"parallel_residual": True}))
    with pytest.raises(UserError, match=rf"query_pre_attn_scalar is {model.head_dim}, but the run file has 3"):
        check_same_model(path, read_state(path), model.model_copy(update={"query_pre_attn_scalar": 3}))


def test_a_checkpoint_with_one_digest_of_the_data_is_read(saved: Path, tmp_path: Path) -> None:
    """Versions before 43efbf37 wrote one digest of the training data, not a digest for each kind of data."""
    path = tmp_path / saved.name
    shutil.copytree(saved, path)
    change_state(first_samples="58e007314fb7798c87670bd593f574ad")(path)
    assert read_state(path).first_samples is None


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("key", "value"), [("seed", 1), ("global_batch_size", 16), ("seq_length", 16)])
def test_another_order_of_samples_is_refused(saved: Path, key: str, value: int) -> None:
    """A checkpoint counts steps. With other settings the same step would point to other samples."""
    job = new_job(tiny_run(LLAMA, training={key: value}))
    before = [tensor.clone() for tensor in tensors_of(job)]
    with pytest.raises(UserError, match=rf"training\.{key} = \d+, but the run file has {value}"):
        load_checkpoint(saved, job)
    assert equal(tensors_of(job), before)


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "place", ["checkpoint.write_file", "checkpoint.write_layout", "checkpoint.write_state", "checkpoint.seal"]
)
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_keeps_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, mode: str
) -> None:
    job = new_job(tiny_run())
    save(job, tmp_path, 1)
    monkeypatch.setattr(f"fourfold.checkpoints.{place}", full_disk)
    checkpointer = Checkpointer(tmp_path, job, CheckpointConfig(async_mode=mode))
    with pytest.raises(UserError, match=rf"cannot write .*{re.escape(str(tmp_path))}.*No space left on device"):
        checkpointer.save(2)
        checkpointer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert load_checkpoint(tmp_path / "step_1", job) == 1
