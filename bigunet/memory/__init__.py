"""Memory of one training step: predicted from the layer table, cause by cause."""
