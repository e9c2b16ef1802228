"""Training a sidecar: rows of documents, question and answer through the frozen base, gradients in the sidecar only."""
