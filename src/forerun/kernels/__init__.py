"""Kernels for an accelerator. Each has a plain form in torch with the same signature, which runs everywhere else and
says what the kernel must give. Nothing of Forerun is imported here.

`gpu/` holds the Triton source and is imported when a kernel first runs; the modules here hold what callers see.
"""
