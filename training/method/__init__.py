"""What the paper is: histograms, fitted prototypes, the cross-batch loss."""
