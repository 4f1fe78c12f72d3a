"""The hot loops, one file per operation: in torch for any device, and native for CPUs."""

from calipers.kernels.dispatch import KernelReport, describe

__all__ = ["KernelReport", "describe"]
