"""What quantization costs: checkpoints beside the float model, on text that they have not seen."""

from calipers.evaluation.bootstrap import Estimate
from calipers.evaluation.evaluate import evaluate
from calipers.evaluation.layers import LayerError
from calipers.evaluation.results import CheckpointScores, Evaluation, Scores

__all__ = ["CheckpointScores", "Estimate", "Evaluation", "LayerError", "Scores", "evaluate"]
