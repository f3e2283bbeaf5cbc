"""Import Hugging Face models as a checkpoint, or straight into the shards of a run."""

from functools import partial
from pathlib import Path

import torch.distributed as dist

from fourfold.checkpoints.global_tensors import TrainingState
from fourfold.checkpoints.imported_checkpoint import write_weights
from fourfold.data.atomic_files import new_folder
from fourfold.huggingface.architectures.config_json import local_folder, model_of, read_config
from fourfold.huggingface.model_folder import (
    PATTERNS,
    SOURCE_FOLDER,
    TOKENIZER_FILE,
    Transferred,
    count_parameters,
    keep_small_files,
)
from fourfold.huggingface.tokenizer_file import check_tokenizer_fits
from fourfold.huggingface.weights import Pretrained
from fourfold.models.lora import ADAPTERS
from fourfold.models.tensor_files import Entry
from fourfold.parallel.grid.shared_failure import failing_together
from fourfold.parallel.state import initialize_shards


def import_huggingface(name: str, out: Path) -> Transferred:
    """Write the weights of a Hugging Face model as a checkpoint, in the dtypes that the weights have in the model's
    files.

    One parameter is in memory at a time.

    Raises:
        UserError: The decoder cannot compute the model, files are missing or damaged, tensors have other shapes, the
            tokenizer does not fit the model, or ``out`` exists.
    """
    folder = local_folder(name, PATTERNS)
    model = model_of(read_config(folder), str(folder))
    pretrained = Pretrained(folder, model)
    check_tokenizer_fits(folder / TOKENIZER_FILE, model)
    entries = [
        Entry(f"model.{ours}", pretrained.dtype(ours), shape, partial(pretrained.read, ours))
        for ours, shape in pretrained.shapes.items()
    ]
    with new_folder(out) as partial_folder:
        keep_small_files(folder, partial_folder / SOURCE_FOLDER)
        files = write_weights(partial_folder, model, entries)
    return Transferred(str(out), pretrained.kind, count_parameters(pretrained.tensors), files)


def load_pretrained(job: TrainingState, name: str) -> None:
    """Fill a job's weights from a Hugging Face model. Every process reads only the slices that it holds.

    LoRA adapters are initialized as at the start of any run.

    Raises:
        UserError: Files are missing or damaged, or tensors have other shapes.
    """
    if dist.get_rank() == 0:
        local_folder(name, PATTERNS)
    dist.barrier()
    pretrained = Pretrained(local_folder(name, PATTERNS), job.run.model)
    initialize_shards(
        [shard for shard in job.shards if shard.name.endswith(ADAPTERS)], job.run.model, job.run.training.seed
    )
    with failing_together():
        for shard in job.shards:
            if shard.local.numel() and not shard.name.endswith(ADAPTERS):
                pretrained.read_into(shard.local, shard.name, shard.slices)
    job.publish()
