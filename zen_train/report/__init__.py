"""What a run leaves for people: a terminal table, report.html, a picture, a model card and metrics.json."""

from zen_train.report.card import model_card
from zen_train.report.metrics import headline, read_metrics, write_metrics
from zen_train.report.page import render_html, write_html
from zen_train.report.picture import write_picture
from zen_train.report.results import (
    ArtifactSize,
    BaseModelInfo,
    Curves,
    DataSource,
    KindSize,
    Losses,
    MergePoint,
    MergeSummary,
    PhaseSeconds,
    Places,
    Provenance,
    RunResults,
    Sample,
    TensorRow,
    TrainPoint,
    ValidationPoint,
)
from zen_train.report.terminal import render_terminal

__all__ = [
    "ArtifactSize",
    "BaseModelInfo",
    "Curves",
    "DataSource",
    "KindSize",
    "Losses",
    "MergePoint",
    "MergeSummary",
    "PhaseSeconds",
    "Places",
    "Provenance",
    "RunResults",
    "Sample",
    "TensorRow",
    "TrainPoint",
    "ValidationPoint",
    "headline",
    "model_card",
    "read_metrics",
    "render_html",
    "render_terminal",
    "write_html",
    "write_metrics",
    "write_picture",
]
