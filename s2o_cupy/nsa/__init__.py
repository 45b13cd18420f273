"""NSA: its configuration, its functions, the rules of a call, and what is launched."""

from .attention import nsa_attention, nsa_compress, nsa_select, selected_attention, window_attention
from .config import NSAConfig
from .gradients import selected_attention_backward

__all__ = [
    "NSAConfig",
    "nsa_attention",
    "nsa_compress",
    "nsa_select",
    "selected_attention",
    "selected_attention_backward",
    "window_attention",
]
