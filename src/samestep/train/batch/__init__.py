"""Where in a tensor the samples of the batch are, and what is done with them."""
