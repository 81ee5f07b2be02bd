"""Parameters, gradients and optimizer state in parts among the workers: torch's FSDP2.

Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel"; ZeRO stage 3
of Rajbhandari et al. 2020. ``fully_shard`` gathers the parameters of a unit, a module that is not
too large, before its forward and its backward pass, and frees them after each. Its gradients are
summed where their part of the parameters is. All workers run the same units in the same order: one
that has no minibatch left runs the model on an earlier one that counts nothing.

The driver takes copies of the whole state from rank 0, to which the others send their parts in the
order in which they travel on, so no worker ever holds them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sparkdl.averager.values.replica_codec import count_non_finite
from sparkdl.collective import Collective
from sparkdl.errors import ConfigError
from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.replica.shards import ShardedSegment, Shards
from sparkdl.strategies.all_reduce.model_and_loss import ModelAndLoss

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SMALL = 16
"""Modules of less than this part of a unit's size stay with the module around them."""
_CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)
"""Of torch's own modules, those that only call the modules in them."""


def units_of(module: nn.Module, unit_bytes: float) -> list[nn.Module]:
    """The modules within one whose parameters are gathered together, inner ones first.

    A unit is as large as possible without being larger than ``unit_bytes``, as far as the modules
    allow, and no parameter in it is used outside of it too. torch's own modules may read the
    parameters of the modules in them, and are not divided, nor those that a Hugging Face model says
    must not be.

    Args:
        module: the whole model; itself not among the units.
        unit_bytes: of trained parameters.
    """
    whole = set(getattr(module, "_no_split_modules", None) or ())
    users: dict[nn.Parameter, set[nn.Module]] = {}
    for user in module.modules():
        for parameter in user._parameters.values():
            if parameter is not None:
                users.setdefault(parameter, set()).add(user)
    found: dict[nn.Module, None] = {}

    def look_into(each: nn.Module) -> None:
        for child in each.children():
            look_at(child)

    def look_at(each: nn.Module) -> None:
        trained = {parameter for parameter in each.parameters() if parameter.requires_grad}
        size = sum(parameter.nbytes for parameter in trained)
        inner = set(each.modules())
        runs = type(each).forward is not nn.Module.forward
        alone = runs and all(users[parameter] <= inner for parameter in trained)
        of_torch = type(each).__module__.startswith("torch.nn.modules.")
        divided = isinstance(each, _CONTAINERS) or not (of_torch or type(each).__name__ in whole)
        if not alone or (size > unit_bytes and divided):
            look_into(each)
        left = size - sum(parameter.nbytes for parameter in trained & _trained_in(found))
        if alone and left >= unit_bytes / SMALL:
            found[each] = None

    look_into(module)
    return list(found)


def _trained_in(modules: dict[nn.Module, None]) -> set[nn.Parameter]:
    return {p for module in modules for p in module.parameters() if p.requires_grad}


class ShardedModel(nn.Module):
    """A replica's model with its loss, in the place of DistributedDataParallel's.

    Args:
        module: the model with its loss.
        replica: the worker's, of which it has a part.
        collective: all workers of the run.
        unit_bytes: how much is gathered together.
    """

    def __init__(
        self,
        module: ModelAndLoss,
        replica: Replica,
        collective: Collective,
        unit_bytes: float,
    ) -> None:
        super().__init__()
        # Takes half a second to import.
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        assert replica.shards is not None
        self.module = module
        self._shards: Shards = replica.shards
        self._shards.all_reduce = collective.all_reduce
        self._replica = replica
        self._collective = collective
        self._sent: list[dist.Work] = []
        everyone = cast(dist.ProcessGroup, dist.group.WORLD)
        mesh = DeviceMesh.from_group(everyone, replica.device.type)
        frozen = {each for each in replica.module.parameters() if not each.requires_grad}
        self._units = [*units_of(replica.module, unit_bytes), replica.module]
        self._running = False
        for unit in self._units:
            unit.register_forward_hook(self._watch)  # first, so that it is called first
            fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=frozen)
            assert isinstance(unit, FSDPModule)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no mean
        self._places = [(part, self._put(part, mesh)) for part in replica.trainable()]
        self._bound = False

    def _put(self, part: nn.Parameter, mesh: DeviceMesh) -> Any:
        """Make a part the module's parameter; its gradients come to the part."""
        from torch.distributed.tensor import DTensor, Shard

        stand_in = self._shards.stand_ins[part]
        place = nn.Parameter(
            DTensor.from_local(
                part.data,
                mesh,
                [Shard(0)],
                run_check=False,
                shape=stand_in.shape,
                stride=stand_in.stride(),
            )
        )
        self._shards.put(part, place)

        def move_gradient(place: Tensor) -> None:
            gradient, place.grad = cast(DTensor, place.grad).to_local(), None
            part.grad = gradient if part.grad is None else part.grad.add_(gradient)

        place.register_post_accumulate_grad_hook(move_gradient)  # type: ignore[no-untyped-call]
        return place

    def forward(self, batch: Batch | None) -> Tensor:
        """The mean loss, as in ``ModelAndLoss``.

        Raises:
            ConfigError: the model reads a parameter of a module without calling the module, or
                takes gradients.
        """
        if batch is not None:
            self._shards.example = batch
        self._running = True
        try:
            loss: Tensor = self.module(batch)
        except RuntimeError as error:
            if "DTensor" not in str(error):
                raise
            raise ConfigError(
                "shard_parameters has the parameters of a module at hand while it runs, but this "
                "model reads some elsewhere. Call the module instead of reading its weight, or "
                f"drop shard_parameters ({error})"
            ) from error
        finally:
            self._running = False
        if not self._bound:
            # fully_shard has moved those that are shorter than the other workers'.
            for part, place in self._places:
                part.data = place.detach().to_local()
            self._bound = True
        return loss

    def _watch(self, unit: nn.Module, given: Any, outputs: Any) -> None:
        for each in tree_leaves(outputs):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(self._require_backward)  # type: ignore[no-untyped-call]

    def _require_backward(self, _: Tensor) -> None:
        """Called before gradients pass a unit, whose parameters torch gathers for that once."""
        if self._running:
            raise ConfigError(
                "shard_parameters: the model or its loss takes gradients itself, through a module "
                "whose parameters are gathered for one backward pass only. Drop shard_parameters"
            )

    def no_sync(self) -> AbstractContextManager[None]:
        """Each minibatch's gradients are summed at once: no worker has room for whole ones."""
        return nullcontext()

    def count_non_finite(self, loss: Tensor) -> int:
        """How many gradients of a loss of this worker alone are NaN or infinite."""
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

        found: list[int] = []

        class Counting(DefaultReduceScatter):
            def __call__(self, **given: Any) -> Any:  # type: ignore[override]
                found.append(count_non_finite(given["input_tensor"]))
                return super().__call__(**given)

        for unit in self._units:
            cast(Any, unit).set_custom_reduce_scatter(Counting())
        self._replica.optimizer.zero_grad()  # the sum that is not finite
        loss.backward()  # type: ignore[no-untyped-call]
        if self._collective.world_size == 1:  # nothing is scattered
            found = [
                count_non_finite(p.grad) for p in self._replica.trainable() if p.grad is not None
            ]
        return sum(found)

    def release(self) -> None:
        """Release the hold on the process group before the group ends; see ``release_model``."""
        self._sent.clear()
        for unit in self._units:
            for group in _parameter_groups(unit):
                group.mesh_info.shard_process_group = None

    def agreed(self) -> Sequence[Tensor | ShardedSegment]:
        """The whole state, for a commit by all workers; the others send rank 0 their parts."""
        for work in self._sent:
            work.wait()
        self._sent.clear()
        segments = self._replica.whole_state(with_optimizer=True)
        for segment in segments:
            if isinstance(segment, Tensor):
                continue
            if self._collective.rank == 0:
                segment.receive = partial(self._receive, segment.dtype)
                continue
            with self._collective.guarded("the sending of parameter shards"):
                for values in segment.mine():
                    sending = dist.isend(values.to(self._replica.device), 0)
                    assert sending is not None
                    self._sent.append(sending)
        return segments

    def _receive(self, dtype: torch.dtype, rank: int, numel: int) -> Tensor:
        values = torch.empty(numel, dtype=dtype, device=self._replica.device)
        with self._collective.guarded("the receiving of parameter shards"):
            dist.recv(values, rank)
        return values


def _parameter_groups(unit: nn.Module) -> list[Any]:
    """What torch keeps of the parameters that it gathers together for a unit."""
    state = cast(Any, unit)._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # torch 2.11 and older have one, or None.
    return [state._fsdp_param_group] if state._fsdp_param_group else []
