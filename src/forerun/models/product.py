"""The product of rows with a weight matrix, in the fastest form that a device has for it.

On a CPU with bfloat16 the matrix is laid out once as the matrix units read it (oneDNN's own order). That is about twice
as fast as multiplying with the plain matrix, and what a row gives no longer depends on how many rows there are. The
plain matrix is dropped then: a model is not held twice. In float32 the plain matrix stays, and C multiplies few rows
with it.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from forerun.models.native.rows import linear

EXPECTED_ROWS = 32
"""The layout serves any number of rows; it is chosen with this many in mind."""


class Product:
    """Linear layers of one input as one product. It is made when their weights are there and where they stay."""

    def __init__(self, *parts: nn.Linear) -> None:
        self.parts = parts
        self.weight: Tensor | None = None
        self.packed: Tensor | None = None
        self.bias: Tensor | None = None

    def prepare(self) -> None:
        weights = [part.weight.data for part in self.parts]
        packed = weights[0].device.type == "cpu" and packs(weights[0].dtype)
        if len(weights) == 1 and not packed:  # it is what it is
            return
        weight = torch.cat(weights)
        if self.parts[0].bias is not None:
            self.bias = torch.cat([part.bias.data for part in self.parts])
        if packed:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)
            return
        self.weight = weight
        for part, own in zip(self.parts, torch.split(weight, [len(weight) for weight in weights]), strict=True):
            part.weight.data = own

    def matrix(self) -> tuple[Tensor, Tensor | None]:
        """The plain weight [out, in] and the bias, where they were not laid out otherwise."""
        assert self.packed is None
        only = self.parts[0]
        return (only.weight, only.bias) if self.weight is None else (self.weight, self.bias)

    def drop_parts(self) -> None:
        """Let go of the matrices that were laid out anew."""
        if self.packed is not None:
            for part in self.parts:
                drop(part)

    def __call__(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """x [R, in] → [R, out], added to `plus` [R, out] where there is one."""
        if self.packed is None:
            return linear(x, *self.matrix(), plus)
        if plus is None:
            product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")
            return product
        added: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, plus, self.packed, self.bias, "add")
        return added


def drop(part: nn.Linear) -> None:
    """Free a layer's matrix, of which there is another form. It keeps its width and has no rows left."""
    part.weight = nn.Parameter(part.weight.data.new_empty(0, part.in_features), requires_grad=False)


@cache
def packs(dtype: torch.dtype) -> bool:
    """Whether this machine has the layout for that number format, and multiplies rightly with it. In float32 the plain
    matrix is faster for one row."""
    if dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    x, weight = torch.linspace(-1, 1, 64).view(2, 32), torch.linspace(1, -1, 512).view(16, 32)
    x, weight = x.to(dtype), weight.to(dtype)
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        product = Product(nn.Linear(32, 16, bias=False, dtype=dtype))
        product.packed = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)
        found, added = product(x), product(x, functional.linear(x, weight))
    except (AttributeError, RuntimeError) as error:  # another build of PyTorch
        warnings.warn(f"bfloat16 products take the slow way here: {error}", RuntimeWarning, stacklevel=2)
        return False
    expected = functional.linear(x.float(), weight.float())
    return torch.allclose(found.float(), expected, atol=0.1) and torch.allclose(added.float(), 2 * expected, atol=0.2)
