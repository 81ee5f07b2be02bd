"""What a project keeps beside its program, and edits: rows, a network, a loss."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

loss_of = nn.functional.mse_loss


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(64, 4, generator=generator)
    noise = torch.randn(64, 1, generator=generator)
    return TensorDataset(features, features.sum(dim=1, keepdim=True) + noise)


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
