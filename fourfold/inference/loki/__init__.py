"""Loki: training-free long-context generation with low-rank keys (Singhania et al. 2024, arXiv 2406.02542).

basis = calibrate(model, windows)
enable_loki(model, basis, LokiConfig(d=32, k=2048))
model.generate(...)
"""

from fourfold.data.transformers_tokenizer import import_transformers

import_transformers()  # If transformers is missing, this raises an error that says how to install it.

from fourfold.inference.loki.basis import LokiBasis  # noqa: E402
from fourfold.inference.loki.cache_size import cache_bytes  # noqa: E402
from fourfold.inference.loki.enable import disable_loki, enable_loki  # noqa: E402
from fourfold.inference.loki.principal_components import calibrate  # noqa: E402
from fourfold.inference.loki.quality_gate import choose_settings  # noqa: E402
from fourfold.inference.loki.settings import LokiConfig  # noqa: E402

__all__ = ["LokiBasis", "LokiConfig", "cache_bytes", "calibrate", "choose_settings", "disable_loki", "enable_loki"]
