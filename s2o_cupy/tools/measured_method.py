"""What another method does to a model's loss on the texts that taus are tuned on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["MeasuredMethod"]


@dataclass(frozen=True)
class MeasuredMethod:
    """A method in all layers that S2O takes.

    Attributes
    ----------
    name, settings : str
        As `compare` has them.
    density : float
        Mean of these layers.
    loss_difference, standard_error : float
        Mean nats a token beyond dense attention's, over all predictions, and its standard error, as of `Trial`.
    moved : float
        Mean Kullback-Leibler divergence of the predictions from dense attention's, in nats.
    """

    name: str
    settings: str
    density: float
    loss_difference: float
    standard_error: float
    moved: float

    def line(self) -> str:
        """For a table, in the columns of `Trial.line`."""
        figures = f"{self.density:>9.3f} {self.loss_difference:>+14.4f} {self.standard_error:>8.4f} {self.moved:>8.4f}"
        return f"{figures}   {self.name}{f' ({self.settings})' if self.settings else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)
