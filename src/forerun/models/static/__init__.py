"""The pass for an accelerator: fixed buffers, fused kernels, captured once for each size and replayed."""
