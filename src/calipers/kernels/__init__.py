"""The hot loops, one file per operation: a reference in torch, and backends for some devices."""

from calipers.kernels.operations import Operation
from calipers.kernels.report import KernelReport, describe

__all__ = ["KernelReport", "Operation", "describe"]
