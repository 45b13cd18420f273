"""Hugging Face models with S2O: `tune_model` finds a tau for each layer or head, `report` says what each layer does.

Importing this imports PyTorch and transformers.
"""

from ..extras import with_extra

with with_extra(__name__, "transformers"):
    import torch  # noqa: F401
    import transformers  # noqa: F401

from .model_report import report
from .model_tuning import tune_model

__all__ = ["report", "tune_model"]
