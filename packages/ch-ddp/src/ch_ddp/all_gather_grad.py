"""Differentiable all-gather."""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ch_core import TUNED, ProcessGroupTransport


class AllGatherGrad(torch.autograd.Function):
    """Gathers the tensors of all ranks and stacks them in rank order: ``(*shape)`` -> ``(world, *shape)``.

    In backward, rank r receives the sum over all ranks of the gradient of slice r. That is the gradient of the sum of
    all losses with respect to its tensor.

    Call ``AllGatherGrad.apply(tensor, group)``. All ranks must pass the same shape and dtype. A group of None means the
    default group.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> x = torch.ones(3, requires_grad=True)
        >>> everyone = AllGatherGrad.apply(x, None)
        >>> everyone.pow(2).sum().backward()
        >>> everyone.shape, x.grad
        (torch.Size([1, 3]), tensor([2., 2., 2.]))
        >>> dist.destroy_process_group()
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        ctx.transport = transport = ProcessGroupTransport(group)
        gathered = tensor.new_empty((transport.world_size, tensor.numel()))
        TUNED.wait(transport.all_gather(gathered.view(-1), tensor.detach().reshape(-1)), gathered, None)
        return gathered.view(transport.world_size, *tensor.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].contiguous().clone()
        TUNED.wait(ctx.transport.all_reduce(total, "sum"), total, None)
        return total[ctx.transport.rank], None
