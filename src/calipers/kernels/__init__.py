"""The hot loops, one file per operation: a reference in torch, and backends for some devices."""

from calipers.kernels.operations import KernelReport, Operation, describe

__all__ = ["KernelReport", "Operation", "describe"]
