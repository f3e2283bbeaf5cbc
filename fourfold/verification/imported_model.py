"""Compare a model that fourfold has imported with the same model in the transformers library. Both libraries open the
same folder, so the comparison tests how fourfold reads config.json, the weights, and the tokenizer."""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.data.tokenizer import load_tokenizer
from fourfold.data.transformers_tokenizer import open_tokenizer
from fourfold.huggingface.architectures.config_json import local_folder
from fourfold.huggingface.import_model import load_pretrained
from fourfold.huggingface.model_folder import PATTERNS, TOKENIZER_FILE
from fourfold.huggingface.transformers_models import load_model
from fourfold.parallel.grid.shared_failure import failing_together
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches
from fourfold.verification.deviation import amplification, deviation
from fourfold.verification.one_process import Logits, Parameters, Reference
from fourfold.verification.parity_report import Deviation
from fourfold.verification.reference_batches import Sequences, random_batch

BATCHES = 4
TEXTS = ("def main():\n    return 3.14\n", "  Zwei Äpfel,\t„zwei“ Euro €  ", "東京 🗼 тест \u0301")
"""Texts with spaces, several scripts, and combining characters."""


def compare_import(job: Job) -> list[Deviation]:
    """Load the weights of the model ``model.from_hf`` into a job, and compare the job's losses with the losses of the
    same model in transformers.

    Every process must call this. Afterwards, the job still has the imported weights.

    Returns:
        On rank 0, the deviations of the losses on random batches. If the folder has a tokenizer, the deviation "tokens"
        follows. This deviation is infinite if fourfold and transformers tokenize a text differently, and otherwise 0.
        On other ranks, the list is empty.

    Raises:
        UserError: The folder cannot be opened. Every process raises it.
    """
    name, found = job.run.model.from_hf, list[Deviation]()
    assert name is not None, "only imported models are compared"
    # Do not mask documents. transformers would need an attention mask, and that mask would replace the model's own
    # sliding windows.
    run = job.run.model_copy(update={"data": job.run.data.model_copy(update={"mask_documents": False})})
    load_pretrained(job, name)
    losses = [job.evaluate(random_micro_batches(run, step, job.grid, job.device)) for step in range(BATCHES)]
    with failing_together():
        if dist.get_rank() == 0:
            folder = local_folder(name, PATTERNS)
            references = [
                Reference(run, _logits(folder, job.device, dtype), {}, job.device, dtype)
                for dtype in (torch.float32, torch.float64)
            ]
            for step, loss in enumerate(losses):
                batch = random_batch(run, step, job.device)
                one, exact = (reference.evaluate(batch)["loss"] for reference in references)
                found.append(deviation(f"loss of batch {step + 1}", loss, one, exact, amplification(run)))
            if (folder / TOKENIZER_FILE).is_file():
                found.append(Deviation("tokens", 0.0 if _has_same_tokens(folder) else math.inf, 0.0))
    return found


def _logits(folder: Path, device: torch.device, dtype: torch.dtype) -> Logits:
    """Load a folder's model with transformers, and return a function that computes logits with the weights in the
    folder. The function ignores the parameters that it gets as its first argument."""
    model = load_model(folder, "fp32", str(device)).to(dtype)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")

    def logits(_: Parameters, batch: Sequences) -> Tensor:
        out: Tensor = model(input_ids=batch.tokens_BS, position_ids=batch.positions_BS, use_cache=False).logits
        return out

    return logits


def _has_same_tokens(folder: Path) -> bool:
    ours, theirs = load_tokenizer(folder), open_tokenizer(str(folder))
    return ours.encode_batch(TEXTS) == [theirs.encode(text, add_special_tokens=False) for text in TEXTS]
