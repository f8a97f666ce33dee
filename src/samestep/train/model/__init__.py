"""Which weights stay equal: replicas, the exchange of their gradients, and what is checked of them."""
