"""Find out whether a model computes packed documents (several documents in one row of a batch) separately."""

import torch
from torch import nn


@torch.no_grad()
def separates_documents(model: nn.Module, device: torch.device) -> bool:
    """Return whether a model computes a document as if no other document came before it in the row.

    The function runs the model on two rows that have different first documents and the same second document. If the
    model separates documents, the logits of the second document are almost equal in both rows. To find out how much the
    logits differ otherwise, the function also runs the model on the same tokens as one document per row.

    Args:
        model: A model that takes ``position_ids``. All processes that hold parts of the model must call this function
            together.
        device: The model's device.
    """
    tokens_4S = torch.tensor([[0, 1, 2, 3], [4, 5, 2, 3]] * 2, device=device)
    positions_4S = torch.tensor([[0, 1, 0, 1]] * 2 + [[0, 1, 2, 3]] * 2, device=device)
    logits_42V = model(input_ids=tokens_4S, position_ids=positions_4S, use_cache=False).logits[:, 2:].float()
    packed, continued = ((logits_42V[row] - logits_42V[row + 1]).abs().max() for row in (0, 2))
    return not packed > 0.1 * continued
