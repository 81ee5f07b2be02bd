"""1-bit Adam: after a warm-up, workers send the signs of Adam's momentum, with shared scales.

Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
Speed" (arXiv 2102.02888), as in DeepSpeed's compressed all-reduce.

In the rule, |c| is the Euclidean norm of n entries, and the sign of 0 is 1. Each parameter has R
chunks, of 8 * ceil(entries / (8 R)) entries except for the last ones, and worker j is the server of
the j-th. The last line is torch's Adam with v as it was after T steps: the paper leaves out both
corrections, which are 1 once T is large enough. For a parameter that was not used in all steps, T
and t count those in which it was. Both errors are a worker's own. They are errors of the momentum
before v scales it, and would not cancel if v changed: that is why v is frozen.

The bound B is not in the paper. It is that of Adam's own steps (Kingma & Ba 2015, "Adam: A Method
for Stochastic Optimization", section 2.1), whose v has seen every gradient that m has. A frozen v
has not, and S is the same for a whole chunk: an entry that hardly had gradients in the warm-up, as
behind a ReLU, would move by lr S / sqrt(v), however far that is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from sparkdl.collective import Collective
from sparkdl.errors import ConfigError, TrainingError
from sparkdl.replica import Replica
from sparkdl.strategies.all_reduce.chain import Step
from sparkdl.strategies.all_reduce.compression import Compression, Compressor
from sparkdl.strategies.arguments import whole

SCALE_BYTES = 4


@dataclass(frozen=True)
class OneBitAdam(Compression):
    """Send one bit per entry of Adam's momentum: ``compression=OneBitAdam(start_after=2000)``.

    Rule:
        For T steps, workers add up their gradients and take Adam's steps. Then the variance v is
        frozen, and with g_i the gradient of worker i, of R, and m the momentum that all have::

            worker i    c  <-  b1 m + (1 - b1) g_i + e_i       s  <-  |c| / sqrt(n) of each chunk
                        send s and the signs of c              e_i  <-  c - s sign(c)
            server j    a  <-  mean of the workers' chunk j + E_j      S  <-  |a| / sqrt(n)
                        send S and the signs of a              E_j  <-  a - S sign(a)
            all         m  <-  S sign(a) of all chunks
                        u  <-  m / (1 - b1^t) / (sqrt(v / (1 - b2^T)) + eps)
                        x  <-  x - lr min(max(u, -B), B)      B = max(1, (1 - b1) / sqrt(1 - b2))

    Phases:
        1. For ``start_after`` steps, all-reduced Adam.
        2. In each step after that, every worker sends each chunk's signs and scale to its server
           (all-to-all), and keeps the error.
        3. Every server sends the mean's signs and scale to all (all-gather), and keeps its error.
        4. All take the same step.

    When:
        To train a large model with ``torch.optim.Adam`` or ``AdamW`` for many steps on a slow link,
        with a long enough warm-up.

    When not:
        For short fits, most of which is warm-up; nor where entries rarely have gradients
        (embeddings of rare words): the warm-up does not find their variance, and they then move by
        the bound or not at all.

    Args:
        start_after: T, the steps of the warm-up, >= 1. No fewer than the learning rate's warm-up
            has (Tang et al.); at least about 1 / (1 - b2) steps, 1000 with Adam's defaults, for v
            to be known.

    Raises:
        ConfigError: an argument is out of range.
    """

    reads_optimizer: ClassVar[bool] = True

    start_after: int = field(metadata=whole(1, "steps (Adam's variance must be known by then)"))

    def require_fits(self, replica: Replica) -> None:
        """Check that the optimizer is one whose variance can be frozen.

        Raises:
            ConfigError: the optimizer is not Adam or AdamW, or has an option for which there is no
                frozen step; or gradients are to be clipped.
        """
        optimizer = replica.optimizer
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            raise ConfigError(
                "OneBitAdam sends the momentum of torch.optim.Adam or AdamW, not of "
                f"{type(optimizer).__name__}; PowerSGD and TopK work with any optimizer"
            )
        for group in optimizer.param_groups:
            for option in ("amsgrad", "maximize", "differentiable"):
                if group[option]:
                    raise ConfigError(f"OneBitAdam does not support {option}=True: drop it")
        if replica.clip_norm is not None:
            raise ConfigError(
                "OneBitAdam cannot clip gradients: after the warm-up no worker knows their sum. "
                "Drop clipNorm, or use PowerSGD or TopK"
            )
        stepped = {each for group in optimizer.param_groups for each in group["params"]}
        if not stepped.issuperset(replica.trainable()):
            raise ConfigError(
                "OneBitAdam needs every parameter that requires a gradient in the optimizer: pass "
                "it all of them, or set requires_grad=False for those not to be trained"
            )

    def compressor(self, collective: Collective, replica: Replica) -> Compressor:
        """One worker's part."""
        return _Momentum(collective, replica, self.start_after)


class _Momentum(Compressor):
    """One worker's errors, and those of the chunks that it serves.

    Args:
        collective: the group of all workers.
        replica: this worker's.
        start_after: steps of the warm-up.
    """

    def __init__(self, collective: Collective, replica: Replica, start_after: int) -> None:
        super().__init__(collective, start_after)
        self._replica = replica
        self._optimizer = replica.optimizer
        self._parameters = replica.trainable()
        groups = self._optimizer.param_groups
        self._groups = {each: group for group in groups for each in group["params"]}
        self._of_chunks: dict[int, Tensor] = {}
        self._agreed: list[int] = []
        # The number of steps behind each parameter's variance: fewer if it was not used in all.
        self._warmed_up: dict[int, float] = {}
        self.memories |= {"chunk": self._of_chunks, "warmed_up": self._warmed_up}

    def average(self, gradients: Mapping[int, Tensor]) -> None:
        """Overwrite gradients with the momentum that all workers have after this step."""
        # For a resumed training, whose optimizer has not taken a step in this process.
        self._replica.optimizer_state.take_over()
        workers, mine = self.collective.world_size, self.collective.index
        messages = []
        for place, gradient in gradients.items():
            momentum = self._own_momentum(place, gradient)
            whole = self.with_error(place, momentum).reshape(-1)
            message, sent = encode(chunks_of(whole, workers), chunk_sizes(len(whole), workers))
            self.errors[place] = whole.sub_(sent.view(-1)[: len(whole)])
            messages.append(message)

        widths = [message.shape[1] for message in messages]
        received = self.collective.all_to_all(torch.cat(messages, dim=1))
        answers = []
        for place, parts in zip(gradients, torch.split(received, widths, dim=1), strict=True):
            errors = self.errors[place]
            size = chunk_sizes(len(errors), workers)[mine]
            chunk = decode(parts, errors.dtype).mean(0)[:size]
            if place in self._of_chunks:
                chunk += self._of_chunks[place]
            width = 8 * (parts.shape[1] - SCALE_BYTES)
            message, sent = encode(functional.pad(chunk, (0, width - size))[None], [size])
            self._of_chunks[place] = chunk.sub_(sent[0, :size])
            answers.append(message[0])

        everyones = torch.stack(self.collective.all_gather(torch.cat(answers)))
        for (place, gradient), parts in zip(
            gradients.items(), torch.split(everyones, widths, dim=1), strict=True
        ):
            errors = self.errors[place]
            agreed = decode(parts, errors.dtype).view(-1)[: len(errors)]
            gradient.copy_(agreed.view(gradient.shape))
            self._agreed.append(place)

    @torch.no_grad()
    def after_reduction(self, step: Step) -> None:
        """Take the step with the variance of the warm-up; the optimizer is left without gradients.

        It does so only if this step's gradients were averaged here.

        Raises:
            TrainingError: Adam has no variance for a parameter.
        """
        super().after_reduction(step)
        for place in self._agreed:
            parameter = self._parameters[place]
            if parameter.grad is None:  # no worker has used it
                continue
            group, state = self._groups[parameter], self._optimizer.state.get(parameter)
            if not state:
                raise TrainingError(
                    f"a parameter of shape {tuple(parameter.shape)} got its first gradient "
                    f"after the warm-up of {self.start_after} steps, so its Adam variance is "
                    "not known. Raise start_after, or use PowerSGD or TopK"
                )
            (beta1, beta2), rate = group["betas"], float(group["lr"])
            warmed_up = self._warmed_up.setdefault(place, float(state["step"]))
            state["step"] += 1
            momentum = state["exp_avg"].copy_(parameter.grad)
            variance = state["exp_avg_sq"] / (1 - beta2**warmed_up)
            if group["decoupled_weight_decay"]:
                parameter.mul_(1 - rate * group["weight_decay"])
            change = momentum / variance.sqrt().add_(group["eps"])
            # Where the whole warm-up had no gradient, a sign would be a huge step.
            change.masked_fill_(variance == 0, 0.0)
            correction = 1 - beta1 ** float(state["step"])
            limit = correction * longest_step(beta1, beta2)
            parameter.sub_(change.clamp_(-limit, limit), alpha=rate / correction)
            parameter.grad = None
        self._agreed.clear()

    def _own_momentum(self, place: int, gradient: Tensor) -> Tensor:
        """What the momentum would be if this worker's gradient were all workers'."""
        parameter = self._parameters[place]
        group, state = self._groups[parameter], self._optimizer.state.get(parameter)
        if group["weight_decay"] and not group["decoupled_weight_decay"]:
            gradient = gradient.add(parameter.detach(), alpha=group["weight_decay"])
        # A parameter that nobody has used yet may not be used now either.
        momentum: Tensor = state["exp_avg"] if state else torch.zeros_like(gradient)
        return momentum.lerp(gradient, 1 - group["betas"][0])


def longest_step(beta1: float, beta2: float) -> float:
    """How many learning rates an entry may move in a step of Adam's (Kingma & Ba 2015, 2.1)."""
    return max(1.0, (1 - beta1) / math.sqrt(1 - beta2))


def octets_of(entries: int, workers: int) -> int:
    """Bytes of the signs of one chunk."""
    return -(-entries // (8 * workers))


def chunk_sizes(entries: int, workers: int) -> list[int]:
    """The number of a parameter's entries in each chunk."""
    width = 8 * octets_of(entries, workers)
    return [max(0, min(width, entries - width * chunk)) for chunk in range(workers)]


def chunks_of(values: Tensor, workers: int) -> Tensor:
    """A parameter's entries, shape (entries,), padded with zeros to (workers, width)."""
    entries = 8 * octets_of(len(values), workers) * workers
    return functional.pad(values, (0, entries - len(values))).view(workers, -1)


def encode(chunks: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Signs and scales of some chunks.

    Args:
        chunks: shape (chunks, 8 * octets), float32 or float64, padded with zeros.
        sizes: how many entries each has.

    Returns:
        Messages, uint8 of shape (chunks, 4 + octets): a float32 and the signs, eight per byte; and
        the values that they encode, of the shape of ``chunks``.
    """
    counts = torch.tensor(sizes, dtype=chunks.dtype, device=chunks.device).clamp_(min=1)
    scales = (torch.linalg.vector_norm(chunks, dim=1) / counts.sqrt()).float()
    positive = chunks >= 0
    bits = positive.view(len(chunks), -1, 8).to(torch.uint8)
    octets = (bits << _shifts(chunks.device)).sum(-1, dtype=torch.uint8)
    message = torch.cat([scales.view(torch.uint8).view(len(chunks), SCALE_BYTES), octets], dim=1)
    return message, _signed(positive, scales.to(chunks.dtype))


def decode(messages: Tensor, dtype: torch.dtype) -> Tensor:
    """The values that messages encode.

    Args:
        messages: shape (chunks, 4 + octets), as returned by ``encode``.
        dtype: of the values.

    Returns:
        Shape (chunks, 8 * octets).
    """
    # Copied, since a four-byte number must begin at a multiple of four.
    scales = messages[:, :SCALE_BYTES].reshape(-1).clone().view(torch.float32)
    bits = (messages[:, SCALE_BYTES:, None] >> _shifts(messages.device)) & 1
    return _signed(bits.view(len(messages), -1).bool(), scales.to(dtype))


def _signed(positive: Tensor, scales: Tensor) -> Tensor:
    return torch.where(positive, scales[:, None], -scales[:, None])


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
