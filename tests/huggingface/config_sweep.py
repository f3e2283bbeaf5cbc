"""Change one key of config.json at a time, in transformers and in our decoder, and compare the logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from config_keys import UNTYPED, keys_of, other_values
from tiny_huggingface import make_model, ours_of, perturb, tokens
from torch import Tensor

from fourfold.config.model import ModelConfig
from fourfold.errors import UserError
from fourfold.huggingface.architectures.config_json import model_of
from fourfold.huggingface.architectures.families import FAMILIES


class Sweep:
    """A tiny transformers model in a folder, whose config.json is changed."""

    def __init__(self, name: str, work: Path) -> None:
        import transformers

        self.folder, self.new_weights = make_model(work / "hf", name), work / "new_weights"
        self.raw = json.loads((self.folder / "config.json").read_text())
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        self.config, self.weights, self.ours = model.config, model.state_dict(), model_of(self.raw, name)
        self.tokens = tokens()[:, :24]
        self.compared = 0
        """Number of changes that transformers accepts and computes logits for. For these, our decoder must compute the
        same logits, or refuse the change by name."""
        with torch.no_grad():
            self.logits = model(self.tokens).logits

    def faults(self) -> list[str]:
        """Return a sentence for every change that transformers follows and our decoder neither follows nor refuses."""
        keys = keys_of(self.raw["model_type"])
        values = {key: other_values(key, getattr(self.config, key, None)) for key in keys}
        found = [self.fault({key: value}) for key in keys for value in values[key]]
        for value in UNTYPED:
            found += self.faults_of_any([key for key in keys if not values[key]], value)
        return [sentence for sentence in found if sentence is not None]

    def faults_of_any(self, keys: Sequence[str], value: Any) -> list[str | None]:
        """Return the faults of several keys that get the same value. Change all keys at once. If there is a fault, try
        each half of the keys. So a thousand keys take little time."""
        if len(keys) == 1:
            return [self.fault({keys[0]: value})]
        if not keys or (self._changes_nothing(dict.fromkeys(keys, value))):
            return []
        half = len(keys) // 2
        return self.faults_of_any(keys[:half], value) + self.faults_of_any(keys[half:], value)

    def fault(self, change: dict[str, Any]) -> str | None:
        """Return what is wrong with a change. Return None if transformers refuses it, if our decoder computes the same,
        or if our decoder refuses it by name."""
        found = self._theirs(change)
        if found is None or not found[1].isfinite().all():
            return None
        folder, theirs = found
        self.compared += 1
        ours: ModelConfig | str = self._ours(change)
        if isinstance(ours, ModelConfig):
            if ours == self.ours and folder == self.folder:
                return None if _same(theirs, self.logits) else f"{change} is ignored"
            try:
                with torch.no_grad():
                    got = ours_of(folder)(self.tokens)[..., : theirs.shape[-1]]
                return None if _same(theirs, got) else f"{change} gives other logits"
            except UserError as error:
                ours = str(error)
        names = _names(change) | self._our_names(change)
        return None if any(name in ours for name in names) else f"{change} is refused by another name: {ours}"

    def _our_names(self, change: dict[str, Any]) -> set[str]:
        """Return the names that the keys of a change have in the run file, and the keys that they override in
        config.json."""
        family = FAMILIES[self.raw["model_type"]]
        theirs = {family.other_names.get(key, key) for key in change}
        return theirs | {ours for ours, key in family.keys.items() if key in theirs}

    def _changes_nothing(self, change: dict[str, Any]) -> bool:
        found = self._theirs(change)
        return found is not None and _same(found[1], self.logits) and self._ours(change) == self.ours

    def _ours(self, change: dict[str, Any]) -> ModelConfig | str:
        try:
            return model_of(self.raw | change, "config.json")
        except UserError as error:
            return str(error)

    def _theirs(self, change: dict[str, Any]) -> tuple[Path, Tensor] | None:
        """Return the folder of a transformers model with the change, and its logits, or None if transformers refuses
        the change. The model has the weights of this sweep's model if their shapes still fit.
        """
        text = json.dumps(self.raw | change)
        (self.folder / "config.json").write_text(text)
        torch.manual_seed(0)
        model = _tried(lambda: _made(self.folder))
        if model is None:
            return None
        folder, is_tied = self.folder, (model.config.tie_word_embeddings, self.config.tie_word_embeddings)
        try:
            model.load_state_dict(self.weights if is_tied[0] == is_tied[1] else {})
        except RuntimeError:  # the shapes of the weights differ
            perturb(model)
            folder = self.new_weights
        with torch.no_grad():
            logits = _tried(lambda: model(self.tokens).logits)
        if logits is None:  # some models without experts cannot be saved
            return None
        if folder is self.new_weights:
            shutil.rmtree(folder, ignore_errors=True)
            model.save_pretrained(folder)
            (folder / "config.json").write_text(text)
        return folder, logits


def _made(folder: Path) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _tried(compute: Callable[[], Any]) -> Any:
    """Return what transformers computes with a changed configuration, or None if it raises any error."""
    try:
        return compute()
    except Exception:  # a wrong key can cause any error
        return None


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= 1e-5 * other.abs().max())


def _names(change: dict[str, Any]) -> set[str]:
    """Return the names that a refusal may use for a change: the key, or a key in the table that is the new value."""
    tables = [value for value in change.values() if isinstance(value, dict)]
    tables += [inner for table in tables for inner in table.values() if isinstance(inner, dict)]
    return {*change, *(key for table in tables for key in table)}
