"""Hugging Face models with S2O, looked at and tuned: `tune_model` finds a tau for each layer or head, `report` says what
each layer does. Importing this imports PyTorch and transformers.
"""

from .model_tuning import tune_model

__all__ = ["tune_model"]
