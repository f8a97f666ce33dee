"""How processes that were started apart come together: in circles of their own run, and of no other."""
