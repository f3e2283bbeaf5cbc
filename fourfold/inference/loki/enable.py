"""Enable and disable Loki in a transformers model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from fourfold.errors import UserError
from fourfold.inference.loki.architecture import AttentionModule, attentions_of, text_config, window_of
from fourfold.inference.loki.basis import LokiBasis
from fourfold.inference.loki.fingerprint import Fingerprint
from fourfold.inference.loki.loki_attention import (
    NAME,
    LayerState,
    after_attention,
    before_attention,
    loki_attention,
    state_of,
)
from fourfold.inference.loki.replace_cache import LayerRecipe
from fourfold.inference.loki.settings import LokiConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("fourfold.loki")

_warned_models: WeakSet[PreTrainedModel] = WeakSet()
"""Models whose sliding windows a warning has already named. Calibration and evaluation enable Loki several times for a
model, but the warning appears only once."""

BATCHING = "init_continuous_batching"
"""The method of transformers' models that all kinds of continuous batching call first."""


def enable_loki(
    model: PreTrainedModel, basis: LokiBasis, config: LokiConfig | None = None, *, capacity: int = 0
) -> PreTrainedModel:
    """Make a model attend with Loki.

    ``model.generate`` and ``model(...)`` work as before, with any transformers cache. The next forward pass replaces
    the layers of the cache with Loki's layers. If you call this function again, the model gets the new basis and the
    new settings. Layers with a sliding window stay dense, and a warning says so once for each model.

    Args:
        model: A transformers model.
        basis: The result of ``calibrate`` for this model.
        config: Loki's settings (default: ``LokiConfig()``). If they set neither ``d`` nor ``d_f``, ``d_f`` is the value
            that ``choose_settings`` has stored in the basis. ``k`` and ``k_f`` work the same way.
        capacity: Number of tokens to allocate memory for at the start, if the final length is known. 0 lets the cache
            grow.

    Returns:
        The model that was passed.

    Raises:
        UserError: The basis belongs to another model, the architecture is not supported, the configuration does not fit
            the model, or the configured kernels cannot run. Or no settings passed ``choose_settings``, and ``config``
            sets none of ``d``, ``d_f``, ``k``, and ``k_f``.
    """
    attentions = attentions_of(model)
    basis.fingerprint.check(Fingerprint.of(text_config(model), attentions))
    given = config or LokiConfig()
    if basis.gate is not None and not basis.gate["chosen"] and not given.model_fields_set & {"d", "d_f", "k", "k_f"}:
        raise UserError("loki: all settings lost too much quality in the calibration; choose d_f and k_f yourself")
    config = basis.filled(given)
    recipes = _recipes(model, attentions, basis, config, capacity)
    parameter = next(model.parameters())
    if config.kernels_for(parameter.device, parameter.dtype) == "numba":
        from fourfold.inference.loki.numba_kernels import compile_for

        compile_for(parameter.dtype)
    disable_loki(model)
    for module in model.modules():
        if hasattr(type(module), BATCHING):
            vars(module)[BATCHING] = _refuse_batching
    # Register a mask function under the same name. Otherwise transformers would pass no mask, and queries would attend
    # to padding and to later tokens.
    AttentionInterface.register(NAME, loki_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = text_config(model)._attn_implementation
    if before == NAME:  # Another model shares this configuration and uses Loki already.
        before = "sdpa"
    model.set_attn_implementation(NAME)
    for attention, recipe in zip(attentions, recipes, strict=True):
        hooks = (
            attention.register_forward_pre_hook(before_attention, with_kwargs=True),
            attention.register_forward_hook(after_attention, always_call=True),
        )
        attention.loki = LayerState(recipe, before, hooks)
    return model


def disable_loki(model: PreTrainedModel) -> PreTrainedModel:
    """Restore a model's original attention, and return the model.

    If the program has set another attention since Loki was enabled, this attention is kept. Models that share a
    configuration object share their attention, so Loki is disabled for all of them.
    """
    before = None
    for module in model.modules():
        vars(module).pop(BATCHING, None)
        state = state_of(module)
        if state is not None:
            before = state.before
            state.release()
            for hook in state.hooks:
                hook.remove()
            del module.loki
    if before is not None and text_config(model)._attn_implementation == NAME:
        model.set_attn_implementation(before)
    return model


def _refuse_batching(*arguments: Any, **keywords: Any) -> NoReturn:
    """Refuse continuous batching. This function replaces a model's ``init_continuous_batching``. If FlashAttention is
    installed, transformers' own method would silently replace Loki by dense attention."""
    raise UserError(
        "loki: continuous batching (generate_batch) is not supported; use model.generate with a padded batch, or call "
        "disable_loki(model) first"
    )


def _recipes(
    model: PreTrainedModel,
    attentions: Sequence[AttentionModule],
    basis: LokiBasis,
    config: LokiConfig,
    capacity: int,
) -> list[LayerRecipe]:
    unknown = [number for number in config.skip_layers if not 0 <= number < len(attentions)]
    if unknown:
        raise UserError(f"loki: skip_layers has {unknown[0]}, but the layers are 0 to {len(attentions) - 1}")
    windows = {number: window for number, each in enumerate(attentions) if (window := window_of(each)) is not None}
    warned: set[type] = set()
    recipes = [
        LayerRecipe(
            config,
            None if number in windows or number in config.skip_layers else basis.of_layer(number, config),
            capacity,
            warned,
        )
        for number in range(len(attentions))
    ]
    if len(config.skip_layers) and all(recipe.encoder is None for recipe in recipes):
        raise UserError("loki: skip_layers leaves no layer to Loki; remove some from it, or use dense attention")
    if len(windows) == len(attentions):
        raise UserError(
            f"loki: every layer of this model sees only the last {max(windows.values())} tokens (sliding_window); use "
            "dense attention, which reads only these tokens"
        )
    if windows and model not in _warned_models:
        _warned_models.add(model)
        log.warning("layers %s have a sliding window and stay dense", ", ".join(map(str, windows)))
    return recipes
