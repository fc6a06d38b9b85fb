"""Triton kernels of the operators. Imported only by a call that runs one; each module stands beside its naive twin."""
