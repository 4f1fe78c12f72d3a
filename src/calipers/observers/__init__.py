"""Observers: objects that watch tensors and find scale, zero point and global scale."""

from calipers.numerics.layout import flatten_for_calibration
from calipers.observers.base import Observer
from calipers.observers.classic import (
    IMatrixMSEObserver,
    MemorylessMinMaxObserver,
    MemorylessMSEObserver,
    MinMaxObserver,
    MovingAverageMSEObserver,
    NVFP4ExpandedIMatrixObserver,
    NVFP4ExpandedMSEObserver,
    StaticMinMaxObserver,
)
from calipers.observers.definition import QParamsDict
from calipers.observers.histogram import (
    EntropyObserver,
    HistogramMSEObserver,
    PercentileObserver,
    ValueCountsObserver,
)
from calipers.observers.optimal import OptimalObserver
from calipers.observers.spec import ObserverSpec
from calipers.observers.whole_model import fuse_weight_observers, get_observer_token_count
from calipers.topology.names import FUSED_LAYER_NAMES

__all__ = [
    "FUSED_LAYER_NAMES",
    "EntropyObserver",
    "HistogramMSEObserver",
    "IMatrixMSEObserver",
    "MemorylessMSEObserver",
    "MemorylessMinMaxObserver",
    "MinMaxObserver",
    "MovingAverageMSEObserver",
    "NVFP4ExpandedIMatrixObserver",
    "NVFP4ExpandedMSEObserver",
    "Observer",
    "ObserverSpec",
    "OptimalObserver",
    "PercentileObserver",
    "QParamsDict",
    "StaticMinMaxObserver",
    "ValueCountsObserver",
    "flatten_for_calibration",
    "fuse_weight_observers",
    "get_observer_token_count",
]
