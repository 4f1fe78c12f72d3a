"""What quantization costs: checkpoints beside the float model, on text that they have not seen."""

from calipers.evaluation.bootstrap import Difference, Estimate
from calipers.evaluation.evaluate import evaluate
from calipers.evaluation.results import CheckpointScores, Evaluation, Scores
from calipers.evaluation.scoring import LayerError

__all__ = [
    "CheckpointScores",
    "Difference",
    "Estimate",
    "Evaluation",
    "LayerError",
    "Scores",
    "evaluate",
]
