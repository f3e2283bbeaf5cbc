"""Weight and average the losses of the layers that predict further tokens (``model.num_nextn_predict_layers``)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.config.model import IGNORE_INDEX
from fourfold.config.run import RunConfig
from fourfold.data.loader import MicroBatch
from fourfold.parallel.grid.communicate import all_reduce
from fourfold.parallel.grid.grid import Grid


class LaterLosses:
    """The losses of a job's D prediction layers (multi-token prediction). Layer d predicts the token d steps after the
    next token."""

    def __init__(self, run: RunConfig, grid: Grid, device: torch.device) -> None:
        depths, self.grid = run.model.num_nextn_predict_layers, grid
        self.weights = torch.full((1 + depths,), run.training.mtp_loss_weight / depths, device=device)
        """Factors [1 + D] on the losses: first on the model's own loss, then on the loss of each prediction layer."""
        self.weights[0].fill_(1.0)  # An assignment would copy the number from the host, and wait for the copy.
        self.means: Tensor | None = None
        """The mean loss of each prediction layer in the most recent step, [D]. None after ``take``."""

    def count(self, micro_batches: Sequence[MicroBatch[Tensor]]) -> Tensor:
        """Return the number of tokens in each prediction layer's loss over all ranks, [D]."""
        labels = [micro_batch.next_labels for micro_batch in micro_batches if micro_batch.next_labels is not None]
        mine = torch.stack([(labels_BSD != IGNORE_INDEX).sum((0, 1)) for labels_BSD in labels]).sum(0)
        return all_reduce(mine, self.grid.tokens, "kept tokens")

    def note(self, means: Tensor) -> Tensor:
        """Store the mean losses of the prediction layers, and return the mean loss of the model itself. ``means`` has
        the model's loss first, then the losses of the layers, [1 + D]."""
        self.means = means[1:]
        return means[0]

    def take(self) -> dict[str, float]:
        """Return the losses of the most recent step, averaged over the prediction layers, with the key ``mtp_loss``.
        Return {} if there was no step since the previous call."""
        means, self.means = self.means, None
        return {} if means is None else {"mtp_loss": means.mean().item()}
