"""dsft: one JSON recipe compiled into everything a fine-tuning job needs, and run."""

__version__ = "0.1.0"
