"""Map the names of floating-point dtypes in run files and safetensors files to torch's dtypes."""

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Maps the names of dtypes in run files and options to torch's dtypes."""

SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Maps the names of weight dtypes in safetensors files to torch's dtypes."""

SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
