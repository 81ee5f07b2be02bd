"""K-FAC: gradients multiplied by the inverse of an approximate Fisher matrix, layer by layer."""

from sparkdl.strategies.kfac.preconditioner import KFACPreconditioner, Preconditioning

__all__ = ["KFACPreconditioner", "Preconditioning"]
