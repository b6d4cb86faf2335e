"""An output head that a growing tree reads in part (`screen.h`): a fifth of its bytes say nearly which tokens are
likeliest, and of those near the likeliest the head itself is asked."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from forerun.models.native import in_c
from forerun.models.native.shelf import Shelf

Screen = in_c.structure("Screen", "width, *first, *second, *second_scales, *rows, *scales")


def fits(directions: Tensor, head: in_c.PassInC) -> bool:
    """Whether it may stand before a head: one in bytes, and not much narrower."""
    width, hidden = directions.shape
    config, order = head.config, head.arithmetic.order
    room = min(config.heads * config.head_dim, config.intermediate_size)
    fitting = width % max(in_c.TILE_ROWS, order.inputs_in_bytes) == 0 and width <= room
    return head.in_bytes and hidden == config.hidden_size and fitting and 2 * width <= hidden


class ScreenInC:
    def __init__(self, head: in_c.PassInC, directions: Tensor) -> None:
        """directions [width, H] need not be at right angles: what is found of a state in them is put together as it is
        nearest to the state."""
        assert fits(directions, head)
        vocabulary, hidden = head.config.vocab_size, head.config.hidden_size
        numbers, scales = head.shelf.last_in_bytes(vocabulary, hidden)
        directions = directions.float()
        second = (numbers.float() * scales[:, None]) @ torch.linalg.pinv(directions)
        order, dtype = head.arithmetic.order, head.arithmetic.dtype
        self.first = Shelf(directions.numel(), order, dtype)
        self.second = Shelf(second.numel(), order, torch.int8)
        self.rows, self.scales = numbers.contiguous(), scales
        where, of_outputs = self.second.put(second)
        self.fields = Screen(
            width=len(directions),
            first=self.first.put(directions.to(dtype))[0],
            second=where,
            second_scales=of_outputs,
            rows=self.rows.data_ptr(),
            scales=self.scales.data_ptr(),
        )
        self.model = in_c.Model.from_buffer_copy(head.model)
        self.model.screen = ctypes.addressof(self.fields)
